"""Work that takes long is no stall, and a suspended process that had such work in hand is one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.patience import Patience
from support.ports import free_port
from support.ready_batches import Feed
from support.up import up

from clawstream.ops.health import Observed, problems_of
from clawstream.ops.monitoring.rules import PATIENCE_S, PROBLEMS, Status
from clawstream.ops.monitoring.watch import LagWatch
from clawstream.runtime.kafka import Cluster
from clawstream.schemas.records import Reward, Segment, Trajectory, TrajectoryStep
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import pack_ids

SLOW_FUNCTIONS = """
import time
from pathlib import Path

HERE = Path(__file__).parent

def wait(name):
    (HERE / f"{name}-begun").touch()
    while not (HERE / "released").exists():
        time.sleep(0.05)

def reward(trajectory):
    wait("reward")
    return 1.0

def advantage(batch, settings):
    wait("trainer")
    return batch.rewards[batch.trajectory]
"""
SLOW = ("reward", "trainer", "lake")
POLL_S = 2.0


def slow(run: str) -> Trajectory:
    step = TrajectoryStep(
        step_id="k~1.0", index=0, segment=0, status="ok", drift="root", prompt_tokens=1,
        response_tokens=1, response_json=b'{"content":"1"}', trainable=True, offset=0,
    )  # fmt: skip
    return Trajectory(
        run_id=run, trajectory_key="k", trajectory_id="k", group_id="g", channel="train",
        outcome="completed", opened_at=0, closed_at=1, part=0, parts=1, steps=(step,),
        segments=(Segment(token_ids=pack_ids([1])),),
    )  # fmt: skip


def statuses(watch: LagWatch, groups: Mapping[str, str]) -> dict[str, Status | None]:
    """Return the status of the groups' backlogs. groups: By group, the topic that it reads."""
    return {b.group: b.status for b in watch.poll() if groups.get(b.group) == b.topic and b.records}


def shows_problems(port: int, groups: Mapping[str, str]) -> bool:
    """Return whether the monitor shows a problem of each group."""
    shown = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    metric = 'clawstream_consumergroup_status{consumergroup="%s",status="%s",topic="%s"} 1'
    return all(
        any(metric % (group, status, topic) in shown for status in PROBLEMS)
        for group, topic in groups.items()
    )


@pytest.mark.parametrize(
    ("watched_s", "seen_s"),
    [(PATIENCE_S + 6, 120.0), pytest.param(90.0, 30.0, marks=pytest.mark.long)],
)
def test_slow_work_is_no_stall_but_a_suspended_process_is(
    settings: Settings,
    cluster: Cluster,
    model_dir: Path,
    tmp_path: Path,
    watched_s: float,
    seen_s: float,
) -> None:
    (tmp_path / "mine.py").write_text(SLOW_FUNCTIONS)
    port = free_port()
    tree: dict[str, Any] = settings.model_dump()
    tree |= {
        "run_id": "r",
        "metrics": {"port": port},
        "functions": {"dirs": [tmp_path], "timeout_s": 3600},
        "trainer": {
            "model_path": model_dir,
            "device": "cpu",
            "algorithm": {"advantage": "mine.py:advantage"},
        },
    }
    tree["lake"] |= {"flush_interval_s": 3600}
    tree["up"] |= {"processes": (*SLOW, "monitor"), "drain_timeout_s": 5}
    tree["jobs"] |= {"reward_functions": {"slow": ("mine.py:reward@1",)}}
    settings = Settings.model_validate(tree)
    feed, topics = Feed(cluster, settings), settings.kafka.topics
    busy = {
        f"{topics.prefix}-reward": topics.trajectories,
        f"{topics.prefix}-trainer.r.train": feed.topic,
        f"{topics.prefix}-lake": topics.trajectories,
    }
    feed.write(feed.batch(0))
    feed.plain.put(topics.trajectories, b"k", feed.codec.encode(slow("slow")))
    feed.plain.flush()
    with up(settings) as started:
        for name in ("reward", "trainer"):
            started.until((tmp_path / f"{name}-begun").exists, f"{name} is in the function")
        started.until(lambda: started.table["lake"]["ready"], "the lake is ready")
        watch, until = LagWatch(cluster, settings), time.monotonic() + watched_s
        while time.monotonic() < until:
            found = statuses(watch, busy)
            assert found.keys() == busy.keys() and {*found.values()} <= {"ok", "behind"}, found
            time.sleep(POLL_S)

        suspended = [psutil.Process(started.table[name]["pid"]) for name in SLOW]
        for process in suspended:
            process.suspend()
        patience = Patience(seen_s)
        status = started.alone("status", "status")
        while not {*(found := statuses(watch, busy)).values()} <= PROBLEMS:
            patience.check(found)
            time.sleep(POLL_S)
        started.until(lambda: shows_problems(port, busy), "the monitor shows them", patience.left_s)
        assert status.wait(120) == 1
        told = started.log("status")
        for (group, topic), process in zip(busy.items(), suspended, strict=True):
            assert f"{group} does not read {topic} (partition " in told
            assert f"is suspended by a signal: kill -CONT {process.pid}" in told
        observed = Observed(processes=started.table, backlogs=watch.poll())
        problems = problems_of(observed, settings, time.time())
        named = {p.subject.split()[0] for p in problems if p.kind == "consumer"}
        assert named == busy.keys()

        (tmp_path / "released").touch()
        for process in suspended:
            process.resume()
        started.until(lambda: len(feed.ids()) == 2, "the batch is trained")
        started.until(
            lambda: any(
                isinstance(feed.codec.decode(r.value), Reward)
                for p in range(cluster.topics(topics.rewards)[topics.rewards])
                for r in cluster.read_all(topics.rewards, p)
            ),
            "the trajectory is rewarded",
        )
        started.stop()
    feed.producer.close()
    feed.plain.close()
