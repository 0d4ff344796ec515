"""Flows played against a real gateway with a scripted engine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.gateway import GatewayFixture, run_gateway
from support.scripted.script import Script, ScriptedChoice

from clawstream.agent_flow import FlowError, flow
from clawstream.agent_flow.flow import Flow, Limits
from clawstream.agent_flow.gateway.client import Gateway
from clawstream.agent_flow.play.command import CommandResult, command_flow
from clawstream.agent_flow.play.progress import Progress
from clawstream.agent_flow.play.runner import SDK_RETRIES, Options, Runner
from clawstream.gateway.api.rollout_budget.budget import BudgetReading
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Reward, RolloutBudget, SessionEvent, Step

CODEC = Codec()
CALL = {
    "id": "call_0",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'},
}
TASKS = [{"id": "sum", "question": "2+2?", "answer": 4}]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def calculator(request: Any) -> Script:
    """Call the tool first, then answer with its result."""
    last = request["messages"][-1]
    if last["role"] == "tool":
        return Script([ScriptedChoice([7], [str(last["content"])], [-0.5])])
    return Script([ScriptedChoice([8], [None], [-0.5], [CALL], "tool_calls")])


def hello(_: Any) -> Script:
    return Script([ScriptedChoice([7, 8], ["Hel", "lo"], [-0.5, -0.25])])


def play(
    tmp_path: Path,
    played: Flow,
    script: Callable[[Any], Script] = hello,
    prepare: Callable[[GatewayFixture], None] | None = None,
    tasks: list[dict[str, Any]] = TASKS,
    **options: Any,
) -> tuple[Progress, list[Any]]:
    """Play a flow; return its progress and the records on the log."""
    progress, records = Progress(), []
    limits = options.pop("limits", Limits(group_size=2, timeout_s=30))
    chosen = replace(Options(limits, run="default", channel="val"), **options)

    async def scenario(fixture: GatewayFixture) -> None:
        if prepare is not None:
            prepare(fixture)
        async with Gateway(fixture.url, None, patience_s=5) as gateway:
            await Runner(played, gateway, chosen, progress).play(lambda: tasks)
        records.extend(fixture.records())

    run_gateway(tmp_path, CODEC, scenario, script)
    return progress, records


def ends(records: list[Any]) -> Counter[str]:
    return Counter(r.kind for r in records if isinstance(r, SessionEvent))


def stop(
    tmp_path: Path,
    played: Flow,
    begun: asyncio.Event,
    kind: type[Gateway] = Gateway,
    then: Callable[[], None] = lambda: None,
) -> Counter[str]:
    """Stop a run when `begun` is set; return the ends of its rollouts.

    then: Called after the stop, before the player has ended.
    """
    records: list[Any] = []

    async def scenario(fixture: GatewayFixture) -> None:
        async with kind(fixture.url, None) as gateway:
            options = Options(Limits(group_size=1), "default", "val")
            playing = asyncio.create_task(
                Runner(played, gateway, options, Progress()).play(lambda: TASKS)
            )
            await begun.wait()
            playing.cancel()
            then()
            with pytest.raises(asyncio.CancelledError):
                await playing
        records.extend(fixture.records())

    run_gateway(tmp_path, CODEC, scenario, hello)
    return ends(records)


@pytest.mark.slow
def test_chat_with_a_tool_is_recorded_and_rewarded(tmp_path: Path) -> None:
    @flow()
    async def calc(task: Any, rollout: Any) -> float:
        reply = await rollout.chat(task["question"], tools=[add], max_turns=6)
        assert reply.tool_calls == ("add",) and reply.turns == 2 and reply.step_id
        assert [m["role"] for m in reply.messages] == ["user", "assistant", "tool", "assistant"]
        return float(str(task["answer"]) in reply.text)

    progress, records = play(tmp_path, calc, calculator)
    assert progress.summary()["rollouts"] == {"completed": 2} and progress.mean_reward == 1.0
    opened = [r for r in records if isinstance(r, SessionEvent) and r.kind == "opened"]
    assert {(r.group_id, r.group_size, r.channel) for r in opened} == {
        (opened[0].group_id, 2, "val")
    }
    assert json.loads(opened[0].metadata_json or b"") == TASKS[0]
    assert [r.value for r in records if isinstance(r, Reward)] == [1.0, 1.0]
    assert ends(records) == {"opened": 2, "completed": 2}


@pytest.mark.parametrize(
    ("given", "turns"), [({}, 2), ({"max_turns": 1}, 1), ({"max_turns": 3}, 2)]
)
def test_chat_has_at_most_max_turns(tmp_path: Path, given: dict[str, int], turns: int) -> None:
    @flow()
    async def calc(task: Any, rollout: Any) -> float:
        reply = await rollout.chat(task["question"], tools=[add], **given)
        return float(reply.turns == turns)

    progress, _ = play(tmp_path, calc, calculator, limits=Limits(group_size=1, attempts=1))
    assert progress.mean_reward == 1.0, progress.reasons


@pytest.mark.slow
def test_a_streamed_chat_is_the_same_chat_and_recorded_as_streams(tmp_path: Path) -> None:
    seen: dict[bool, Any] = {}

    @flow()
    async def calc(task: Any, rollout: Any) -> float:
        for stream in (False, True):
            seen[stream] = await rollout.chat(
                task["question"], tools=[add], max_turns=6, stream=stream
            )
        return float("4" in seen[True].text)

    progress, records = play(tmp_path, calc, calculator, limits=Limits(group_size=1, attempts=1))
    assert progress.mean_reward == 1.0, progress.reasons
    plain, streamed = seen[False], seen[True]
    assert streamed.step_id and streamed.step_id != plain.step_id
    assert replace(streamed, step_id=plain.step_id) == plain
    assert [r.streamed for r in records if isinstance(r, Step)] == [False, False, True, True]


def test_failed_attempt_is_replaced_and_the_last_one_fails(tmp_path: Path) -> None:
    tries: Counter[str] = Counter()

    @flow()
    async def flaky(task: Any, rollout: Any) -> float:
        member = rollout.key.partition(".")[0]
        tries[member] += 1
        if member.endswith("-0") or tries[member] == 1:
            raise OSError("the tool server is away")
        return 1.0

    progress, records = play(tmp_path, flaky)
    assert progress.summary()["rollouts"] == {"completed": 1, "failed": 1, "replaced": 2}
    assert ends(records) == {"opened": 4, "completed": 1, "failed": 1, "replaced": 2}
    assert len([r for r in records if isinstance(r, Reward)]) == 1
    reasons = {r.reason for r in records if isinstance(r, SessionEvent) and r.kind == "failed"}
    assert reasons == {"OSError: the tool server is away"}


@pytest.mark.parametrize("returned", [float("nan"), "good", {}])
def test_value_that_is_no_reward_is_a_failure_and_never_zero(tmp_path: Path, returned: Any) -> None:
    @flow()
    def wrong(task: Any, rollout: Any) -> Any:
        return returned

    progress, records = play(tmp_path, wrong, limits=Limits(group_size=1, attempts=1))
    assert progress.summary()["rollouts"] == {"failed": 1} and not progress.succeeded
    assert not [r for r in records if isinstance(r, Reward)]


def test_rollout_that_never_ends_is_abandoned(tmp_path: Path) -> None:
    @flow()
    async def stuck(task: Any, rollout: Any) -> None:
        await asyncio.Event().wait()

    progress, records = play(
        tmp_path, stuck, limits=Limits(group_size=1, attempts=1, timeout_s=0.05)
    )
    assert ends(records) == {"opened": 1, "abandoned": 1}
    assert progress.reasons == {"no result within 0.05 s": 1}


def test_every_trajectory_key_is_valid_and_used_once(tmp_path: Path) -> None:
    """Also with a name that is no id, a long task id, tasks of one id, and several epochs."""

    async def greet(task: Any, rollout: Any) -> float:
        return 1.0

    greet.__name__ = "my agent " * 9
    tasks = [{"id": "x" * 300}, {"id": "same"}, {"id": "same"}, {"id": "other"}]
    progress, records = play(
        tmp_path, flow()(greet), tasks=tasks, epochs=2, limits=Limits(group_size=1)
    )
    assert progress.summary()["rollouts"] == {"completed": 8}
    opened = [r for r in records if isinstance(r, SessionEvent) and r.kind == "opened"]
    assert len({r.trajectory_key for r in opened}) == len({r.group_id for r in opened}) == 8


async def leaks_a_cancellation(task: Any, rollout: Any) -> None:
    own = asyncio.create_task(asyncio.sleep(60))
    own.cancel()
    await own


async def times_out_elsewhere(task: Any, rollout: Any) -> None:
    raise TimeoutError("the tool server is slow")


async def exits(task: Any, rollout: Any) -> None:
    raise SystemExit(3)


def exits_in_a_thread(task: Any, rollout: Any) -> None:
    raise SystemExit(3)


def stops_in_a_thread(task: Any, rollout: Any) -> None:
    next(iter([]))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (leaks_a_cancellation, "CancelledError: "),
        (times_out_elsewhere, "TimeoutError: the tool server is slow"),
        (exits, "SystemExit: 3"),
        (exits_in_a_thread, "RuntimeError: SystemExit(3)"),
        (stops_in_a_thread, "RuntimeError: StopIteration()"),
    ],
)
def test_whatever_a_flow_raises_is_a_failed_rollout_with_its_reason(
    tmp_path: Path, function: Callable[..., Any], reason: str
) -> None:
    progress, records = play(tmp_path, flow()(function), limits=Limits(group_size=1, attempts=1))
    assert progress.reasons == {reason: 1}
    assert ends(records) == {"opened": 1, "failed": 1}


def test_stopping_ends_rollouts_in_progress(tmp_path: Path) -> None:
    begun = asyncio.Event()

    @flow()
    async def stuck(task: Any, rollout: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    assert stop(tmp_path, stuck, begun) == {"opened": 1, "abandoned": 1}


def test_stopping_ends_a_rollout_whose_reward_is_on_its_way(tmp_path: Path) -> None:
    asked = asyncio.Event()

    class SlowGateway(Gateway):
        async def complete(
            self, place: Any, outcome: Any, reward: Any = None, reason: Any = None
        ) -> None:
            if reward is not None:
                asked.set()
                await asyncio.Event().wait()
            await super().complete(place, outcome, reward, reason)

    @flow()
    async def named(task: Any, rollout: Any) -> dict[str, float]:
        return {"exact": 1.0}

    assert stop(tmp_path, named, asked, SlowGateway) == {"opened": 1, "abandoned": 1}


def test_stopping_ends_a_rollout_that_is_being_opened(tmp_path: Path) -> None:
    asked, answered = asyncio.Event(), asyncio.Event()

    class SlowGateway(Gateway):
        async def open(self, *given: Any) -> Any:
            session = await super().open(*given)
            asked.set()
            await answered.wait()
            return session

    @flow()
    async def never(task: Any, rollout: Any) -> None:
        raise AssertionError

    assert stop(tmp_path, never, asked, SlowGateway, answered.set) == {"opened": 1, "abandoned": 1}


def test_time_out_while_another_agent_is_opened_ends_both(tmp_path: Path) -> None:
    class SlowGateway(Gateway):
        async def open(self, place: Any, metadata: Any) -> Any:
            session = await super().open(place, metadata)
            if place.key.endswith(".critic"):
                await asyncio.sleep(0.1)
            return session

    @flow()
    async def debate(task: Any, rollout: Any) -> float:
        await rollout.agent("critic")
        return 1.0

    async def scenario(fixture: GatewayFixture) -> None:
        async with SlowGateway(fixture.url, None) as gateway:
            limits = Limits(group_size=1, attempts=1, timeout_s=0.05)
            options = Options(limits, "default", "val")
            await Runner(debate, gateway, options, Progress()).play(lambda: TASKS)
        assert ends(fixture.records()) == {"opened": 2, "abandoned": 2}

    run_gateway(tmp_path, CODEC, scenario, hello)


def test_generator_that_blocks_does_not_stop_rollouts(tmp_path: Path) -> None:
    """The second task is there only when the first has been played."""
    played, threads = threading.Event(), set()

    @flow()
    async def greet(task: Any, rollout: Any) -> float:
        played.set()
        return 1.0

    class Source(list[dict[str, Any]]):
        def __iter__(self) -> Any:
            for number in range(2):
                threads.add(threading.get_ident())
                yield {"id": number}
                assert played.wait(30)

    progress, _ = play(tmp_path, greet, tasks=Source(), limits=Limits(group_size=1))
    assert progress.summary()["rollouts"] == {"completed": 2} and len(threads) == 1


def test_named_rewards_and_other_agents(tmp_path: Path) -> None:
    @flow()
    async def debate(task: Any, rollout: Any) -> dict[str, float]:
        critic = await rollout.agent("critic")
        assert critic is await rollout.agent("critic")
        said = await rollout.chat("say")
        judged = await critic.chat(f"judge {said.text}")
        await critic.step_reward(judged.step_id, 0.25)
        critic.reward = 0.5
        return {"exact": 1.0, "style": 0.5}

    _, records = play(tmp_path, debate, limits=Limits(group_size=1))
    rewards = {
        (r.trajectory_key.partition(".")[2], r.name, r.step_id is not None): r.value
        for r in records
        if isinstance(r, Reward)
    }
    assert rewards == {
        ("", "exact", False): 1.0,
        ("", "style", False): 0.5,
        ("critic", "step", True): 0.25,
        ("critic", "complete_trajectory", False): 0.5,
    }
    assert ends(records) == {"opened": 2, "completed": 2}
    # Without this a group could be admitted before it has its members' rewards.
    assert {
        r.trajectory_key.partition(".")[2]: r.rewards
        for r in records
        if isinstance(r, SessionEvent) and r.kind == "completed"
    } == {"": {"exact": 1.0, "style": 0.5}, "critic": {"complete_trajectory": 0.5}}


def test_another_agent_is_opened_once_and_has_a_name(tmp_path: Path) -> None:
    @flow()
    async def debate(task: Any, rollout: Any) -> float:
        one, other = await asyncio.gather(rollout.agent("critic"), rollout.agent("critic"))
        assert one is other
        with pytest.raises(FlowError, match="must not be a number"):
            await rollout.agent("2")
        return 1.0

    progress, records = play(tmp_path, debate, limits=Limits(group_size=1, attempts=1))
    assert ends(records) == {"opened": 2, "completed": 2}, progress.reasons


@pytest.mark.slow
def test_reward_of_another_agent_is_checked_like_a_return_value(tmp_path: Path) -> None:
    @flow()
    async def whole_numbers(task: Any, rollout: Any) -> int:
        (await rollout.agent("critic")).reward = 1
        return 1

    _, records = play(tmp_path / "whole", whole_numbers, limits=Limits(group_size=1))
    assert [r.value for r in records if isinstance(r, Reward)] == [1.0, 1.0]

    @flow()
    async def broken(task: Any, rollout: Any) -> float:
        (await rollout.agent("critic")).reward = float("nan")
        return 1.0

    progress, records = play(tmp_path / "nan", broken, limits=Limits(group_size=1, attempts=1))
    assert ends(records) == {"opened": 2, "failed": 2}
    assert "not a finite number" in next(iter(progress.reasons))


def test_both_clients_repeat_requests_equally_long(tmp_path: Path) -> None:
    @flow()
    async def compare(task: Any, rollout: Any) -> float:
        assert rollout.anthropic.max_retries == rollout.openai.max_retries == SDK_RETRIES
        assert rollout.anthropic.timeout == rollout.openai.timeout == 30
        return 1.0

    progress, _ = play(tmp_path, compare)
    assert progress.mean_reward == 1.0, progress.reasons


def test_dry_run_has_no_effect(tmp_path: Path) -> None:
    @flow()
    async def greet(task: Any, rollout: Any) -> float:
        await rollout.chat("hi")
        return 1.0

    progress, records = play(tmp_path, greet, dry=True)
    assert progress.mean_reward == 1.0
    assert ends(records) == {"opened": 1, "abandoned": 1}
    assert not [r for r in records if isinstance(r, Reward)]


def test_groups_wait_for_the_rollout_budget(tmp_path: Path) -> None:
    @flow()
    async def greet(task: Any, rollout: Any) -> float:
        return 1.0

    budget = RolloutBudget(
        run_id="default", channel="train", journal_id="j", read_to=0, policy_version=1,
        max_staleness=1, sync_every=1, batch_groups=1, next_batch_seq=0, groups_admitted=0,
        groups_refused=0, replacements={}, replacements_total=0, refusals=(), dropped=None,
        ended=False,
    )  # fmt: skip

    def prepare(fixture: GatewayFixture) -> None:
        full = BudgetReading(budget, newest_sync_index=None, age_s=0.0)
        fixture.budgets.readings["default", "train"] = full

        def publish() -> None:
            assert not fixture.records()
            fixture.budgets.readings["default", "train"] = replace(full, newest_sync_index=0)

        asyncio.get_running_loop().call_later(0.3, publish)

    progress, records = play(tmp_path, greet, prepare=prepare, channel="train")
    assert progress.groups == 1 and ends(records) == {"opened": 2, "completed": 2}


def test_reward_out_of_bounds_is_a_failure_with_the_gateways_reason(tmp_path: Path) -> None:
    @flow()
    async def greedy(task: Any, rollout: Any) -> float:
        return 1e9

    progress, records = play(tmp_path, greedy, limits=Limits(group_size=1))
    assert ends(records) == {"opened": 1, "failed": 1}
    assert "gateway.reward_max" in next(iter(progress.reasons))


def test_refused_reward_of_one_agent_leaves_the_rewards_of_the_others(tmp_path: Path) -> None:
    @flow()
    async def debate(task: Any, rollout: Any) -> float:
        (await rollout.agent("critic")).reward = 1e9
        (await rollout.agent("judge")).reward = 0.25
        return 0.5

    progress, records = play(tmp_path, debate, limits=Limits(group_size=1))
    assert ends(records) == {"opened": 3, "completed": 2, "failed": 1}
    failed = [r for r in records if isinstance(r, SessionEvent) and r.kind == "failed"]
    assert [r.trajectory_key.partition(".")[2] for r in failed] == ["critic"]
    assert sorted(r.value for r in records if isinstance(r, Reward)) == [0.25, 0.5]
    assert progress.outcomes == {"completed": 1}
    assert "gateway.reward_max" in next(iter(progress.reasons))


def test_function_that_is_not_async_and_never_ends_leaves_its_place_to_others(
    tmp_path: Path,
) -> None:
    release = threading.Event()

    @flow()
    def sleepy(task: Any, rollout: Any) -> float:
        if task["id"] == 0:
            release.wait(60)
        return 1.0

    limits = Limits(group_size=1, concurrency=1, attempts=1, timeout_s=0.3)
    try:
        progress, records = play(
            tmp_path, sleepy, tasks=[{"id": n} for n in range(3)], limits=limits
        )
    finally:
        release.set()
    assert ends(records) == {"opened": 3, "abandoned": 1, "completed": 2}
    assert progress.reasons == {"no result within 0.3 s": 1}


@pytest.mark.parametrize("channel", ["val", "train"])
def test_gateway_that_is_away_ends_the_command(channel: Any) -> None:
    @flow()
    async def greet(task: Any, rollout: Any) -> float:
        return 1.0

    async def scenario() -> None:
        async with Gateway("http://127.0.0.1:9", None, patience_s=0.1) as gateway:
            options = Options(Limits(), "default", channel)
            await Runner(greet, gateway, options, Progress()).play(lambda: TASKS)

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(scenario())
    assert caught.group_contains(FlowError, match="is the gateway running")


AGENT = """
import json, os, sys, urllib.request
body = {"model": "policy", "messages": [{"role": "user", "content": sys.argv[1]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"})
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
open(os.environ["CLAWSTREAM_REWARD_FILE"], "w").write("0.75")
sys.exit(len(sys.argv) - 2)
"""


@pytest.mark.parametrize(
    ("reward", "extra", "outcome", "value"),
    [
        ("exit", [], "completed", 1.0),
        ("exit", ["fails"], "completed", 0.0),
        ("file", [], "completed", 0.75),
        ("file", ["fails"], "failed", None),
        ("grader", [], "completed", 0.5),
        ("none", [], "completed", None),
    ],
)
@pytest.mark.slow
def test_command_line_is_an_agent(
    tmp_path: Path, reward: str, extra: list[str], outcome: str, value: float | None
) -> None:
    def grade(task: Any, result: CommandResult) -> float:
        assert result.exit_code == 0 and result.directory.is_dir()
        return 0.5 if result.stdout == "Hello\n" and task["answer"] == 4 else 0.0

    command = ["python3", "-c", AGENT, "{question}", *extra]
    played = command_flow(command, reward, grade if reward == "grader" else None)
    progress, records = play(tmp_path, played, limits=Limits(group_size=1, attempts=1))
    assert ends(records) == {"opened": 1, outcome: 1}, progress.reasons
    assert [r.value for r in records if isinstance(r, Reward)] == ([] if value is None else [value])
    assert len([r for r in records if not isinstance(r, SessionEvent | Reward)]) == 1


def test_command_does_not_get_the_callers_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLAWSTREAM_API_KEY", "claw-secret")
    check = 'test -z "$CLAWSTREAM_API_KEY" && test -n "$OPENAI_API_KEY"'
    progress, _ = play(
        tmp_path, command_flow(["sh", "-c", check], "exit", None), limits=Limits(group_size=1)
    )
    assert progress.mean_reward == 1.0


def test_command_with_an_unknown_field_is_a_failure(tmp_path: Path) -> None:
    played = command_flow(["echo", "{promt}"], "none", None)
    progress, _ = play(tmp_path, played, limits=Limits(group_size=1, attempts=1))
    assert next(iter(progress.reasons)).endswith(
        "argument {promt}: the task has only answer, id, question"
    )
