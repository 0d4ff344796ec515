"""`python -m clawstream.demo`: train a policy on a tool task with all processes of an installation.

1. Kafka, gateway, jobs, admission, lake and vLLM start; vLLM boots with random weights.
2. Meanwhile a tiny model is made and warm-started; the trainer publishes it as version 0, and vLLM
   loads it.
3. The agent plays held-out tasks (T = 1 and greedy), then training groups while versions are
   published, then the held-out tasks again.
4. All processes stop in order; the report counts steps on Kafka, in the lake and at the gateway.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from clawstream.demo.configuration import demo_settings
from clawstream.demo.episodes import (
    Episode,
    Played,
    Player,
    evaluation,
    share_correct,
    training_group,
)
from clawstream.demo.feed import LoopState, follow
from clawstream.demo.live import Live
from clawstream.demo.pacing import may_launch
from clawstream.demo.report import ask_lake, count_topics, draw_curve, final_lag, install_seconds
from clawstream.ops.up import Installation
from clawstream.runtime.process.child import die_with_parent
from clawstream.runtime.process.lifecycle import run_async
from clawstream.runtime.process.supervisor import Supervisor
from clawstream.runtime.topics.records import create_topics
from clawstream.schemas.errors import ForeseenError
from clawstream.schemas.settings import Settings

READY_TIMEOUT_S = 300.0
STALL_S = 240.0


class DemoFailed(ForeseenError):
    """A part of the loop failed. The message names it; logs are in <data_dir>/logs."""


def main(settings: Settings) -> None:
    """Entry point of `python -m clawstream.demo`."""
    run_async("demo", demo_settings(settings), run)


def fresh_home(home: Path) -> None:
    """Make an empty directory; the last run moves to <name>.previous.

    Raises:
        AlreadyRunning: that run has not ended.
    """
    previous = home.with_name(home.name + ".previous")
    if home.exists():
        last = Supervisor(home)
        last.acquire()
        shutil.rmtree(previous, ignore_errors=True)
        home.rename(previous)
        last.release()
    (home / "logs").mkdir(parents=True)


async def make_model(settings: Settings, kind: str, out: Path) -> None:
    """Make a model in a process of its own, which frees torch's memory at its end."""
    steps = settings.demo.warm_start_steps
    where = f"Path({str(out)!r}), dtype={settings.demo.dtype!r}"
    call = (
        f"make_model({where}, steps={steps})" if kind == "warm" else f"make_random_model({where})"
    )
    code = (
        "from pathlib import Path; "
        f"from clawstream.demo.model import make_model, make_random_model; {call}"
    )
    with (settings.data_dir / "logs" / f"model-{kind}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *die_with_parent([sys.executable, "-c", code]), stdout=log, stderr=log
        )
        try:
            if await process.wait() != 0:
                raise DemoFailed(f"making the {kind} model failed: see {log.name}")
        finally:
            if process.returncode is None:
                process.kill()


async def run(settings: Settings, stop: asyncio.Event) -> None:
    """Run the whole demo. Ctrl-C ends it in order, without a report."""
    fresh_home(settings.data_dir)
    async with Installation(settings) as installation:
        job = asyncio.create_task(_demo(settings, installation))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({job, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not job.done():
                job.cancel()
            await asyncio.wait({job})
        finally:
            stopping.cancel()
            job.cancel()
        if job.cancelled():
            sys.stderr.write("stopped before the end: no report\n")
        else:
            job.result()


async def _demo(settings: Settings, installation: Installation) -> None:
    started = time.monotonic()
    with Live(settings, started) as live:
        live.show("starting Kafka and making the model")
        boot = asyncio.create_task(make_model(settings, "boot", settings.data_dir / "boot"))
        warm = asyncio.create_task(make_model(settings, "warm", settings.data_dir / "model"))
        try:
            installation.remember()
            installation.start("broker")
            await installation.wait_for_kafka()
            topics = settings.kafka.topics
            ready = [topics.ready_batches_spec(settings.run_id, c) for c in settings.admit.channels]
            await asyncio.to_thread(create_topics, installation.cluster, settings, ready)
            await boot
            installation.start("rollout", "gateway", "assemble", "reward", "admit", "lake")
            live.show(
                f"warm start: {settings.demo.warm_start_steps} supervised steps, while vLLM boots"
            )
            await warm
        finally:
            boot.cancel()
            warm.cancel()
        live.phase_done("warm_start")
        installation.start("trainer")
        state, done = LoopState(), asyncio.Event()
        live.state = state
        feed = asyncio.create_task(follow(installation.cluster, settings, state, done))
        try:
            async with Player(settings, settings.data_dir / "logs" / "agents.log") as player:
                live.player = player
                await player.wait_until_ready(READY_TIMEOUT_S)
                live.phase_done("start")
                result = await _learn(settings, installation, player, state, live)
        finally:
            done.set()
            await feed
        live.show("stopping in order")
        stopped_clean = await installation.stop_in_order(keep_broker=True)
        live.show("counting")
        report = await asyncio.to_thread(_report, settings, installation, state, result)
        report["stopped_clean"] = stopped_clean
        report["phases"] = live.phases
        report["seconds"] = round(time.monotonic() - started, 1)
        report["restarts"] = {
            n: p["restarts"] for n, p in installation.supervisor.table.items() if p["restarts"]
        }
        await installation.stop_broker()
    _finish(settings, report)


async def _learn(
    settings: Settings, installation: Installation, player: Player, state: LoopState, live: Live
) -> dict[str, Any]:
    """Evaluate, train, evaluate. Returns what the agent saw and the gateway's own counters."""
    result: dict[str, Any] = {}
    live.show("held-out tasks before training")
    result["eval_before"] = await _evaluate(settings, player, "before", None)
    result["eval_before_greedy"] = await _evaluate(settings, player, "before-greedy", 0.0)
    live.phase_done("evaluation_before")
    live.show("training")
    played = await _train(settings, installation, player, state)
    live.phase_done("training")
    live.show("held-out tasks after training")
    result["eval_after"] = await _evaluate(settings, player, "after", None)
    result["eval_after_greedy"] = await _evaluate(settings, player, "after-greedy", 0.0)
    live.phase_done("evaluation_after")
    result["episodes"] = len(played)
    result["episodes_failed"] = sum(p.error is not None for p in played)
    result["turns_answered"] = player.turns_answered
    result["answered"] = player.answered
    result["steps_answered"] = await player.steps_answered()
    return result


async def _evaluate(
    settings: Settings, player: Player, name: str, temperature: float | None
) -> float:
    return share_correct(await _play(player, evaluation(settings, name, temperature)))


async def _train(
    settings: Settings, installation: Installation, player: Player, state: LoopState
) -> list[Played]:
    """Keep groups going, as many as staleness allows, until the last version is published and
    loaded.
    """
    demo = settings.demo
    rng = random.Random(1000 + demo.seed)
    groups: set[asyncio.Task[list[Played]]] = set()
    played: list[Played] = []
    launched, progress, seen = 0, time.monotonic(), (-1, -1)
    while (state.loaded or 0) < demo.versions:
        allowed = may_launch(
            state.loaded or 0,
            launched,
            state.refused_groups,
            demo.groups_per_batch,
            demo.staleness,
            demo.versions,
        )
        for _ in range(allowed):
            episodes = training_group(settings, launched, rng)
            groups.add(asyncio.create_task(_play(player, episodes)))
            launched += 1
        await asyncio.sleep(0.05)
        finished = {g for g in groups if g.done()}
        groups -= finished
        played += [p for g in finished for p in g.result()]
        if (now := (state.batches, state.loaded or 0)) != seen:
            seen, progress = now, time.monotonic()
        _check_alive(installation, time.monotonic() - progress, seen)
    played += [p for g in await asyncio.gather(*groups) for p in g]
    return played


async def _play(player: Player, episodes: list[Episode]) -> list[Played]:
    return list(await asyncio.gather(*(player.play(e) for e in episodes)))


def _check_alive(installation: Installation, idle_s: float, seen: tuple[int, int]) -> None:
    down = {
        n: p["state"]
        for n, p in installation.supervisor.table.items()
        if p["state"] not in ("running", "restarting", "done")
    }
    if down:
        raise DemoFailed(f"these stay down: {down}; see {installation.settings.data_dir / 'logs'}")
    if idle_s > STALL_S:
        raise DemoFailed(
            f"no progress for {STALL_S:g} s at batch {seen[0]}, version {seen[1]}; see "
            f"{installation.settings.data_dir / 'logs'}"
        )


def _report(
    settings: Settings, installation: Installation, state: LoopState, result: dict[str, Any]
) -> dict[str, Any]:
    cluster = installation.cluster
    lake, curve, answers = ask_lake(settings)
    lags = final_lag(cluster, settings)
    answered = result.pop("answered")
    report = {
        "seed": settings.demo.seed,
        **result,
        **count_topics(cluster, settings, answered),
        "steps_in_lake": lake.get("steps_ok", 0),
        "steps_aborted_in_lake": lake.get("steps_aborted", 0) + lake.get("steps_error", 0),
        "duplicates_in_lake": lake["duplicates"],
        "second_turns": lake["second_turns"],
        "drift_after_stop": lake["drift_after_stop"],
        "drift_after_length": lake["drift_after_length"],
        "final_lag": sum(lags.values()),
        "final_lag_by_group": lags,
        "weight_versions": len(state.versions_loaded),
        "engine_starts": len(state.engines_started),
        "install_seconds": install_seconds(),
        "answers": answers,
    }
    draw_curve(
        settings.data_dir / "reward.png",
        curve,
        result["eval_before"],
        result["eval_after"],
        state.loaded or 0,
    )
    return report


def _finish(settings: Settings, report: dict[str, Any]) -> None:
    path = settings.data_dir / "report.json"
    path.write_text(json.dumps(report, indent=1))
    out = [f"\nheld-out tasks, T = 1: {report['eval_before']:.3f} -> {report['eval_after']:.3f}"]
    out.append(
        f"held-out tasks, greedy: {report['eval_before_greedy']:.3f} -> "
        f"{report['eval_after_greedy']:.3f}"
    )
    out.append(
        f"{report['weight_versions']} weight versions in {report['seconds']:.0f} s, final lag "
        f"{report['final_lag']}\n"
    )
    for answer in report["answers"]:
        out += [
            f"{answer['question']}\n  {answer['sql']}",
            *(f"    {json.dumps(row)}" for row in answer["rows"][-5:]),
            "",
        ]
    out.append(f"report        {path}\nreward curve  {settings.data_dir / 'reward.png'}\n")
    out.append(
        "next: query the lake, e.g.\n  .venv/bin/clawstream sql "
        '"select outcome, count(*) from trajectories group by 1" '
        f"data_dir={settings.data_dir}\n"
    )
    sys.stdout.write("\n".join(out))
