"""The reward job on a real Kafka: every closed trajectory is answered, and readers see one
answer."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.model_endpoint import Reply, chat, model_endpoint
from support.positions import tell
from support.processes import freeze, pids_with, until

from clawstream.runtime.exit_codes import EXIT_SETTINGS, EXIT_SOURCE
from clawstream.runtime.kafka import Cluster, Record, SourceTruncated
from clawstream.runtime.process.child import die_with_parent
from clawstream.runtime.process.config import overrides_of
from clawstream.runtime.topics.records import create_topics
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import (
    DeadLetter,
    DeadLetterResolved,
    Reward,
    Segment,
    StepMark,
    Trajectory,
    TrajectoryStep,
)
from clawstream.schemas.settings import Settings
from clawstream.schemas.settings.reward_models import CodeTests, Judge
from clawstream.schemas.tokens import pack_ids, pack_logprobs
from clawstream.stream_jobs.assemble.output_records import in_parts
from clawstream.stream_jobs.reward.evaluate import RuleEvaluator
from clawstream.stream_jobs.reward.job import EXPIRE_MS, EXPIRE_RECORDS, INCOMPLETE, RewardJob

ROOT = Path(__file__).parents[2]
RUN = (
    "import sys; from clawstream.runtime.process.config import load; "
    "from clawstream.stream_jobs.reward.main import main; "
    "main(load(overrides=sys.argv[1:]))"
)
STOP_S = 10.0
"""Longest time from SIGTERM to the end of the process, whatever a function does."""
CODEC = Codec()
Eventually = Callable[..., Any]


def trajectory(key: str, answer: str, run: str = "run", **more: Any) -> Trajectory:
    response = pack_ids([3])
    step = TrajectoryStep(
        step_id=f"{key}~C.0", index=0, segment=1, status="ok", drift="root", prompt_tokens=1,
        response_tokens=1, response_json=b'{"content":"' + answer.encode() + b'"}', trainable=True,
        offset=0,
    )  # fmt: skip
    given: dict[str, Any] = {
        "run_id": run, "trajectory_key": key, "trajectory_id": key, "group_id": key,
        "channel": "train", "outcome": "completed", "opened_at": 0, "closed_at": 1,
        "metadata_json": b'{"gold":"42"}', "part": 0, "parts": 1, "steps": (step,),
        "segments": (
            Segment(token_ids=pack_ids([1])),
            Segment(parent=0, step_index=0, token_ids=response, logprobs=pack_logprobs([-0.1])),
        ),
    }  # fmt: skip
    return Trajectory(**(given | more))


@contextmanager
def worker(
    settings: Settings, functions: dict[str, tuple[str, ...]]
) -> Iterator[subprocess.Popen[bytes]]:
    tuned = settings.model_copy(
        update={"jobs": settings.jobs.model_copy(update={"reward_functions": functions})}
    )
    with (settings.data_dir / "reward.log").open("ab") as log:
        process = subprocess.Popen(
            die_with_parent([sys.executable, "-c", RUN, *overrides_of(tuned)]),
            cwd=ROOT,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def read(cluster: Cluster, topic: str) -> list[Any]:
    partitions = range(cluster.topics(topic)[topic])
    return [CODEC.decode(r.value) for p in partitions for r in cluster.read_all(topic, p)]


def test_every_closed_trajectory_is_answered(
    settings: Settings, cluster: Cluster, eventually: Eventually
) -> None:
    create_topics(cluster, settings)
    topics, producer = settings.kafka.topics, cluster.producer()

    def put(*events: Any) -> None:
        for event in events:
            producer.put(topics.trajectories, event.trajectory_key.encode(), CODEC.encode(event))
        producer.flush()

    functions = {
        "run": ("exact_match@1", "clawstream.schemas.tokens:count@2"),
        "*": ("last_number@1.5",),
    }
    whole = trajectory("parts", "42")
    parts = list(
        in_parts(replace(whole, segments=whole.segments * 40, steps=whole.steps * 30), 4000)
    )
    assert len(parts) > 3
    with worker(settings, functions) as job:
        put(
            trajectory("right", "42"), trajectory("wrong", "41"),
            trajectory("failed", "42", outcome="failed"),
            trajectory("bare", "42", metadata_json=None),
            trajectory("lost", "", outcome="lost", segments=(), steps=()),
            trajectory("elsewhere", "so 41 or 42", run="other"),
            StepMark(
                event_id="m", run_id="run", trajectory_key="right", step_id="right~C.1",
                mark="late", offset=1,
            ),
            *parts[:2],
        )  # fmt: skip
        producer.put(topics.trajectories, b"right", b"garbage")
        eventually(lambda: len(read(cluster, topics.rewards)) >= 11, 180)
        job.kill()  # in the middle of a trajectory: its writer was killed too, and starts again
        job.wait()
    with worker(settings, functions) as job:
        put(*parts, trajectory("right", "42"))
        eventually(
            lambda: any(r.trajectory_key == "parts" for r in read(cluster, topics.rewards)), 180
        )
        group = f"{topics.prefix}-reward"
        ends = {
            (topics.trajectories, p): high
            for p, (_, high) in cluster.watermarks(topics.trajectories).items()
            if high
        }
        eventually(lambda: {k: v for k, v in cluster.committed(group).items() if v} == ends)
        job.send_signal(signal.SIGTERM)
        assert job.wait(STOP_S) == 0
    producer.close()

    answers: dict[tuple[str, str], Reward] = {}
    for r in read(cluster, topics.rewards):
        assert (r.source, r.trajectory_id) == ("rule", r.trajectory_key)
        before = answers.setdefault((r.trajectory_key, r.name), r)
        assert replace(r, created_at=0) == replace(before, created_at=0), (
            "answered again, otherwise"
        )
    said = {
        k: (r.value, r.reason, r.function_version, r.reward_revision) for k, r in answers.items()
    }
    assert {k[0]: v for k, v in said.items() if k[1] == "exact_match"} == {
        "right": (1.0, None, "1", 1),
        "wrong": (0.0, None, "1", 1),
        "failed": (1.0, None, "1", 1),
        "bare": (None, "ValueError: no metadata", "1", 1),
        "lost": (None, "trajectory lost: no payload", "1", 1),
        "parts": (1.0, None, "1", 1),
    }
    assert said["elsewhere", "last_number"] == (1.0, None, "1.5", 0)
    assert said["right", "count"][0] is None and "TypeError" in str(said["right", "count"][1])
    letters = [d for d in read(cluster, topics.dead_letters) if isinstance(d, DeadLetter)]
    assert {(d.reason, d.value, d.process) for d in letters} == {
        ("undecodable", b"garbage", "reward")
    }


def test_retention_that_overtakes_a_worker_is_an_error(
    settings: Settings, cluster: Cluster, eventually: Eventually
) -> None:
    """The consumer silently continues at the log's start; the lost records would have no reward."""
    create_topics(cluster, settings)
    topics, producer = settings.kafka.topics, cluster.producer()
    patient = settings.model_copy(
        update={"jobs": settings.jobs.model_copy(update={"session_timeout_s": 60.0})}
    )

    def put(key: str) -> int:
        """Write a trajectory and return the end offset of the partition."""
        producer.put(topics.trajectories, b"k", CODEC.encode(trajectory(key, "42")), partition=0)
        producer.flush()
        return cluster.watermarks(topics.trajectories, [0])[0][1]

    def answered(key: str) -> bool:
        return any(r.trajectory_id == key for r in read(cluster, topics.rewards))

    def overtaken(job: subprocess.Popen[bytes], turn: int) -> bool:
        """Return whether the worker died because of the lost records.

        It survives when a fetch in flight has already returned the deleted records.
        """
        put(f"before{turn}")
        eventually(lambda: answered(f"before{turn}"))
        freeze(job.pid)
        put(f"under-way{turn}")  # a record for such a fetch
        cluster.delete_records(topics.trajectories, 0, put(f"gone{turn}"))
        put(f"behind{turn}")
        job.send_signal(signal.SIGCONT)
        eventually(lambda: job.poll() is not None or answered(f"behind{turn}"))
        assert answered(f"gone{turn}") or not answered(f"behind{turn}"), (
            "it went on behind the hole"
        )
        return job.poll() is not None

    with worker(patient, {"*": ("exact_match@1",)}) as job:
        assert any(overtaken(job, turn) for turn in range(3))
        assert job.wait() == EXIT_SOURCE
    low = cluster.watermarks(topics.trajectories, [0])[0][0]
    told = f"source truncated: {topics.trajectories}-0 begins at offset {low}; "
    assert told in (settings.data_dir / "reward.log").read_text()
    producer.close()


@pytest.mark.parametrize("replayed", [True, False], ids=["replayed", "lost"])
def test_a_control_record_that_retention_took_is_no_loss_where_that_is_known(
    settings: Settings, cluster: Cluster, replayed: bool
) -> None:
    """A replay's transaction ends in a control record, at the position of a job that has read all.

    A data record may have been at that offset as well.
    """
    create_topics(cluster, settings)
    topics, tid = settings.kafka.topics, cluster.topic_id(settings.kafka.topics.trajectories)
    producer, plain = cluster.producer("a-replay"), cluster.producer()
    value = CODEC.encode(trajectory("k", "42"))
    sent = DeadLetterResolved(
        topic=topics.trajectories, topic_id=tid, partition=0, offset=7, action="replayed", by="me",
        created_at=0, sent_topic_id=tid, sent_partition=0, sent_offset=0,
    )  # fmt: skip
    if replayed:
        with producer.transaction():
            producer.put(topics.trajectories, b"k", value, partition=0)
            producer.put(topics.dead_letters, b"k", CODEC.encode(sent))
    else:
        plain.put(topics.trajectories, b"k", value, partition=0)
        plain.put(topics.trajectories, b"k", value, partition=0)
        plain.put(
            topics.dead_letters,
            b"k",
            CODEC.encode(replace(sent, sent_topic_id="that of another topic")),
        )
    plain.flush()
    (first, *_) = cluster.read_all(topics.trajectories, await_open=True)

    async def work() -> None:
        running, started = (RewardJob(settings, cluster, RuleEvaluator(settings)) for _ in range(2))
        await running.assigned([0])
        await running.process(0, [first])
        await running.tick()
        group, position = f"{settings.kafka.topic_prefix}-reward", {(topics.trajectories, 0): 1}
        tell(cluster, group, position)
        assert cluster.committed(group) == position
        cluster.delete_records(topics.trajectories, 0, 2)
        assert cluster.watermarks(topics.trajectories, [0])[0] == (2, 2)
        if replayed:
            await started.assigned([0])
        else:
            with pytest.raises(SourceTruncated, match="holds offsets 2 to 1, position 1"):
                await started.assigned([0])
        plain.put(topics.trajectories, b"k", value, partition=0)
        plain.flush()
        (behind,) = cluster.read_all(topics.trajectories)
        for job in (running, *([started] if replayed else [])):
            if replayed:
                assert await job.process(0, [behind]) == {topics.trajectories: 2}
            else:
                with pytest.raises(
                    SourceTruncated, match="begins at offset 2; 1 was due and 2 came"
                ):
                    await job.process(0, [behind])
        running.close()
        started.close()

    asyncio.run(work())
    producer.close()
    plain.close()


@pytest.mark.parametrize(
    ("just_in_time", "too_late"),
    [((1 + EXPIRE_RECORDS, 0), (2 + EXPIRE_RECORDS, 0)), ((3, EXPIRE_MS), (4, EXPIRE_MS + 1))],
    ids=["records", "time"],
)
def test_what_never_becomes_whole_is_answered_and_holds_nothing_up(
    settings: Settings, cluster: Cluster, just_in_time: tuple[int, int], too_late: tuple[int, int]
) -> None:
    """Run the job in this process, because a test cannot set the log's time.

    just_in_time, too_late: (offset, milliseconds); the last part came at (1, 0).
    """
    create_topics(cluster, settings)
    topics, functions = settings.kafka.topics, {"*": ("exact_match@1",)}
    whole = trajectory("broken", "42")
    parts = list(
        in_parts(replace(whole, segments=whole.segments * 40, steps=whole.steps * 30), 4000)
    )

    def record(offset: int, at_ms: int, event: Trajectory) -> Record:
        return Record(
            topics.trajectories,
            0,
            offset,
            at_ms,
            event.trajectory_key.encode(),
            CODEC.encode(event),
            {},
        )

    batches = [
        [record(0, 0, parts[0]), record(1, 0, parts[1]), record(2, 0, trajectory("beside", "42"))],
        [record(*just_in_time, trajectory("in-time", "42"))],
        [record(*too_late, trajectory("behind", "42"))],
        [record(too_late[0] + 1, too_late[1], parts[2])],
    ]

    async def work() -> list[int]:
        jobs = settings.jobs.model_copy(update={"reward_functions": functions})
        tuned = settings.model_copy(update={"jobs": jobs})
        job = RewardJob(tuned, cluster, RuleEvaluator(tuned))
        await job.assigned([0])
        done = [(await job.process(0, batch))[topics.trajectories] for batch in batches]
        job.close()
        return done

    assert asyncio.run(work()) == [-1, -1, too_late[0], too_late[0] + 1]
    answers = [r for r in read(cluster, topics.rewards) if isinstance(r, Reward)]
    assert sorted((r.trajectory_id, r.value, r.reason) for r in answers) == [
        ("behind", 1.0, None), ("beside", 1.0, None),
        ("broken", None, f"trajectory lost: {INCOMPLETE}"), ("in-time", 1.0, None),
    ]  # fmt: skip
    (letter,) = read(cluster, topics.dead_letters)
    first = batches[0][0]
    assert (letter.topic, letter.topic_id) == (
        topics.trajectories,
        cluster.topic_id(topics.trajectories),
    )
    assert (letter.partition, letter.offset, letter.key, letter.value) == (
        0,
        0,
        first.key,
        first.value,
    )
    assert (letter.process, letter.reason, letter.detail) == (
        "reward",
        "invalid",
        f"{INCOMPLETE}: {len(parts)} were due",
    )


def test_unknown_function_is_a_settings_error(settings: Settings) -> None:
    with worker(settings, {"*": ("no_such@1",)}) as job:
        assert job.wait(180) == EXIT_SETTINGS
    assert (
        "jobs.reward_functions.*: 'no_such@1': no built-in reward"
        in (settings.data_dir / "reward.log").read_text()
    )


def test_a_function_that_hangs_or_crashes_costs_its_own_trajectory_and_no_stop(
    settings: Settings, cluster: Cluster, eventually: Eventually
) -> None:
    """The job answers the other trajectories meanwhile.

    SIGTERM ends the worker although a function runs that no other mechanism would end.
    """
    create_topics(cluster, settings)
    topics, producer = settings.kafka.topics, cluster.producer()
    functions = settings.functions.model_copy(
        update={"dirs": (ROOT / "tests" / "support",), "timeout_s": 3.0, "processes": 2}
    )
    limited = settings.model_copy(update={"functions": functions})
    patient = settings.model_copy(
        update={"functions": functions.model_copy(update={"timeout_s": 3600.0})}
    )
    configured = {"run": ("own_functions.py:of_answers@1",), "*": ("exact_match@1",)}

    def put(*said: Trajectory) -> None:
        for one in said:
            producer.put(topics.trajectories, one.trajectory_key.encode(), CODEC.encode(one))
        producer.flush()

    def answered() -> dict[str, tuple[float | None, str | None]]:
        return {r.trajectory_id: (r.value, r.reason) for r in read(cluster, topics.rewards)}

    with worker(limited, configured) as job:
        put(
            trajectory("a", "loop"),
            trajectory("b", "crash"),
            trajectory("c", "0.5"),
            trajectory("d", "42", run="other"),
            trajectory("f", "eat"),
            trajectory("g", "nan"),
            trajectory("h", "raise"),
        )
        eventually(lambda: len(answered()) == 7, 180)
        assert answered() == {
            "a": (None, "timeout"),
            "b": (None, "crashed"),
            "c": (0.5, None),
            "d": (1.0, None),
            "f": (None, "more memory than functions.memory_mb=4096"),
            "g": (None, "nan is not in [-1e+06, 1e+06]"),
            "h": (
                None,
                "ValueError: could not convert string to float: 'raise' "
                "(own_functions.py, line 72)",
            ),
        }
        job.send_signal(signal.SIGTERM)
        assert job.wait(STOP_S) == 0
    with worker(patient, configured) as job:
        begun = settings.data_dir / "begun"
        put(trajectory("e", "wait", metadata_json=orjson.dumps({"begun": str(begun)})))
        eventually(begun.exists, 180)
        job.send_signal(signal.SIGTERM)
        assert job.wait(STOP_S) == 0, "it would have waited an hour"
    assert "e" not in answered()
    producer.close()


def judge(url: str, **more: Any) -> Judge:
    given = {"type": "genrm", "url": url, "model": "m", "rubric": "Right is good."}
    return Judge.model_validate(given | more)


@contextmanager
def rated_by(settings: Settings, models: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker that rates the run of each model's name with this model."""
    jobs = settings.jobs.model_copy(update={"reward_models": models})
    functions = settings.functions.model_copy(update={"processes": 3})
    tuned = settings.model_copy(update={"jobs": jobs, "functions": functions})
    rules = {name: (f"{name}@1",) for name in models} | {"*": ("exact_match@1",)}
    with worker(tuned, rules) as job:
        yield job


def closed(cluster: Cluster, topics: Any, *replies: tuple[str, str, str]) -> None:
    """Put closed trajectories, of which each has a run, a key and a reply, on the log."""
    producer = cluster.producer()
    for run, key, said in replies:
        text = orjson.dumps(said).decode()[1:-1]
        one = trajectory(key, text, run, metadata_json=b'{"tests":["pass"],"gold":"42"}')
        producer.put(topics.trajectories, key.encode(), CODEC.encode(one))
    producer.close()


@pytest.mark.usefixtures("bubblewrap")
def test_each_fault_of_a_judge_or_of_code_is_recorded_and_others_go_on(
    settings: Settings, cluster: Cluster, eventually: Eventually
) -> None:
    create_topics(cluster, settings)
    topics, released = settings.kafka.topics, threading.Event()

    def answer(body: Any) -> Reply:
        if body["model"] == "slow":
            released.wait()
        return chat('{"score": 8}')

    def answered() -> dict[str, Reward]:
        return {r.trajectory_id: r for r in read(cluster, topics.rewards)}

    with model_endpoint(answer) as endpoint:
        models = {
            "tests": CodeTests(type="code", timeout_s=25),
            "down": judge("http://127.0.0.1:1", timeout_s=1),
            "slow": judge(endpoint.url, model="slow", timeout_s=1),
            "poor": judge(endpoint.url, budget_calls=1),
        }
        with rated_by(settings, models) as job:
            closed(
                cluster,
                topics,
                ("tests", "forks", "import os\nwhile True: os.fork()"),
                ("tests", "connects", "import socket; socket.create_connection(('127.0.0.1', 1))"),
                ("tests", "fills", "open('/tmp/x', 'wb').write(bytes(1 << 25))"),
                ("tests", "right", "x = 1"),
                ("poor", "poor-1", "1"),
                ("poor", "poor-2", "2"),
                ("down", "down", "42"),
                ("slow", "slow", "42"),
                ("other", "other", "42"),
            )
            found = eventually(lambda: said if len(said := answered()) == 9 else None, 180)
            job.send_signal(signal.SIGTERM)
            assert job.wait(STOP_S) == 0
        released.set()
    outcomes = {
        key: (found[key].value, orjson.loads(found[key].detail_json or b"")["outcome"])
        for key in ("forks", "connects", "fills", "right")
    }
    assert outcomes.pop("right") == (1.0, "passed")
    assert {value for value, _ in outcomes.values()} == {0.0}
    assert {outcome for _, outcome in outcomes.values()} <= {"failed", "memory"}
    path = "/chat/completions in 1 s"
    assert found["slow"].value is None and found["down"].value is None
    assert found["slow"].reason == f"EndpointError: no reply of {endpoint.url}{path}"
    unconnected = f"NotServed: no reply of http://127.0.0.1:1{path}: ClientConnectorError"
    assert str(found["down"].reason).startswith(unconnected)
    poor = {(found[key].value, found[key].reason) for key in ("poor-1", "poor-2")}
    assert poor == {(0.8, None), (None, "OverBudget: over budget: 1 of 1 calls in 3600 s")}
    assert found["other"].value == 1.0


def test_sigterm_ends_the_worker_while_a_judge_does_not_reply(
    settings: Settings, cluster: Cluster, eventually: Eventually
) -> None:
    create_topics(cluster, settings)
    released = threading.Event()

    def answer(body: Any) -> Reply:
        released.wait()
        return chat('{"score": 8}')

    with model_endpoint(answer) as endpoint:
        with rated_by(settings, {"patient": judge(endpoint.url)}) as job:
            closed(cluster, settings.kafka.topics, ("patient", "patient", "42"))
            eventually(lambda: endpoint.requests, 180)
            job.send_signal(signal.SIGTERM)
            assert job.wait(STOP_S) == 0
        released.set()
    assert read(cluster, settings.kafka.topics.rewards) == []


@pytest.mark.usefixtures("bubblewrap")
def test_sigterm_ends_the_worker_and_the_program_that_it_runs(
    settings: Settings, cluster: Cluster, eventually: Eventually
) -> None:
    create_topics(cluster, settings)
    word = f"outlives-{settings.kafka.topic_prefix}"
    sleeper = f"['python3', '-c', 'import time; time.sleep(3600)', {word!r}]"
    program = f"import os, sys; os.execv(sys.executable, {sleeper})"
    with rated_by(settings, {"tests": CodeTests(type="code", timeout_s=25)}) as job:
        closed(cluster, settings.kafka.topics, ("tests", "runs", program))
        until(lambda: bool(pids_with(word)))
        job.send_signal(signal.SIGTERM)
        assert job.wait(STOP_S) == 0
    until(lambda: not pids_with(word))
    assert read(cluster, settings.kafka.topics.rewards) == []
