"""Test users' functions in child processes.

Whatever a function does, its call ends and the next call is answered.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import pytest

from clawstream.ops.preflight import problems_of
from clawstream.rewards.registry import Rule
from clawstream.rewards.results import rewards_of
from clawstream.runtime.functions.child import Source
from clawstream.runtime.functions.pool import LATE_S, FunctionPool, PoolStopped, _Call, _Function
from clawstream.schemas.records import Trajectory, TrajectoryStep
from clawstream.schemas.rule_spec import NamedFunction, NoAnswer
from clawstream.schemas.settings import FunctionSettings, Settings
from clawstream.schemas.user_function import FunctionNotFound
from clawstream.stream_jobs.reward.assessments import assessment_of

TESTS = Path(__file__).parents[3] / "support"
ROOT = TESTS.parents[1]


def trajectory(**metadata: Any) -> Trajectory:
    step = TrajectoryStep(
        step_id="k~1.0", index=0, status="ok", drift="root", prompt_tokens=1, response_tokens=1,
        response_json=b'{"content":"1"}', trainable=True, offset=0,
    )  # fmt: skip
    return Trajectory(
        run_id="r",
        trajectory_key="k",
        trajectory_id="k",
        group_id="g",
        channel="train",
        outcome="completed",
        opened_at=0,
        closed_at=1,
        metadata_json=orjson.dumps(metadata),
        part=0,
        parts=1,
        segments=(),
        steps=(step,),
    )


@pytest.fixture(scope="module")
def pool() -> Iterator[FunctionPool]:
    with FunctionPool(
        FunctionSettings(dirs=(TESTS,), timeout_s=0.5, processes=1, memory_mb=512)
    ) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("speaks", 0.5, None), ("loops", None, "timeout"), ("speaks", 0.5, None),
        ("crashes", None, "crashed"),
        ("exits", None, "SystemExit: 3 (own_functions.py, line 42)"),
        ("fails", None, "ValueError: no (own_functions.py, line 46)"), ("speaks", 0.5, None),
        ("eats", None, "more memory than functions.memory_mb=512"),
        ("not_a_number", None, "nan is not in [-1e+06, 1e+06]"), ("endless", None, "timeout"),
        ("too_few", None, "ValueError: 0 results for 1 trajectories"),
    ],
)  # fmt: skip
def test_every_call_has_a_reward_or_says_why_not(
    pool: FunctionPool, name: str, value: float | None, reason: str | None
) -> None:
    rule = Rule(name, "1", pool.find(f"own_functions.py:{name}"))
    assert [(r.value, r.reason) for r in rewards_of(trajectory(), rule, 0)] == [(value, reason)]


OOPS = "ValueError: could not convert string to float: 'oops' (own_functions.py, line 102)"


def together(pool: FunctionPool, name: str, told: list[str]) -> list[Any]:
    """Return the answers of calls that wait together for the pool's one process."""
    function, answers = pool.find(f"own_functions.py:{name}"), list[Any]()
    all_wait = threading.Event()
    pool._threads.submit(all_wait.wait)
    with ThreadPoolExecutor(len(told)) as threads:
        calls = [threads.submit(function, trajectory(told=do)) for do in told]
        until(lambda: pool._threads._work_queue.qsize() == len(told))
        all_wait.set()
        for call in calls:
            try:
                answers.append(call.result())
            except NoAnswer as e:
                answers.append(str(e))
    return answers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "told", "answers"),
    [
        ("waits_together", ["1", "sleep", "2", "oops"], [1.0, "timeout", 2.0, OOPS]),
        ("waits_together", ["1", "block", "2"], [1.0, "timeout", 2.0]),
        ("by_batch", [""] * 5, [3.0, 3.0, 3.0, 2.0, 2.0]),
        ("by_batch", ["", "raise"], [1.0, "ValueError: not this one (own_functions.py, line 126)"]),
        ("by_batch", ["", "crash"], [1.0, "crashed"]),
    ],
)
def test_calls_that_wait_are_sent_together_and_a_failure_is_its_own(
    pool: FunctionPool, name: str, told: list[str], answers: list[Any]
) -> None:
    found = together(pool, name, told)
    assert sorted(map(str, found)) == sorted(map(str, answers))  # in the order in which they came


def test_a_function_is_made_from_its_configuration(pool: FunctionPool) -> None:
    made = [
        pool.find("own_functions.py:configured", orjson.dumps({"value": value}).decode())
        for value in (0.25, 0.75)
    ]
    assert [function(trajectory()) for function in made] == [0.25, 0.75]


def test_scores_of_a_quality_rule_come_as_they_were_said(pool: FunctionPool) -> None:
    rules = [
        NamedFunction(name, "1", pool.find(f"own_functions.py:{name}"))
        for name in ("scores", "fails")
    ]
    said = assessment_of(trajectory(), rules, 0)
    assert said.step_quality == (0.25,)
    assert [(f.rule, f.score, f.evidence) for f in said.findings] == [
        ("scores@1", 0.25, "odd"),
        ("fails@1", None, "ValueError: no (own_functions.py, line 46)"),
    ]


@pytest.mark.parametrize("name", ["nothing", "TESTS"])
def test_what_is_not_there_is_told_when_it_is_named(pool: FunctionPool, name: str) -> None:
    with pytest.raises(FunctionNotFound, match=f"{name}"):
        pool.find(f"own_functions.py:{name}")


def test_a_function_keeps_its_process_until_it_fails(pool: FunctionPool) -> None:
    process, crash = (
        pool.find("own_functions.py:says_its_process"),
        pool.find("own_functions.py:crashes"),
    )
    before = process(trajectory())
    assert before == process(trajectory()) != os.getpid()
    with pytest.raises(NoAnswer, match="crashed"):
        crash(trajectory())
    assert process(trajectory()) != before


def test_a_process_with_unread_answers_gets_no_further_call(pool: FunctionPool) -> None:
    process = pool.find("own_functions.py:says_its_process")
    source = Source("own_functions.py:says_its_process")
    with pytest.raises(ValueError, match="unread"), pool._child() as child:
        child._connection.send(("call", tuple(source), [trajectory()], 1))
        raise ValueError("unread")
    assert process(trajectory()) != child.pid


def test_a_function_of_many_calls_leaves_a_process_to_others() -> None:
    pool = FunctionPool(FunctionSettings(processes=2))
    judge, plain = (_Function(Source(name), n) for name, n in (("judge", 32), ("plain", 1)))
    pool._functions = {judge.source: judge}
    judge.waiting.append(_Call(0))
    judge.children = 1
    assert pool._next() is judge, "alone it may have all processes"
    pool._functions[plain.source] = plain
    assert pool._next() is None
    plain.waiting.append(_Call(1))
    assert pool._next() is plain
    plain.children = 1
    assert pool._next() is plain
    judge.children = 0
    assert pool._next() is judge, "it has the fewest"
    plain.children = 0
    assert pool._next() is judge, "it waits longest"
    pool.stop()


def test_a_process_that_does_not_start_is_no_answer_of_the_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with (
        FunctionPool(FunctionSettings(processes=1)) as pool,
        pytest.raises(MemoryError, match="a process for functions does not start"),
    ):
        pool.find("own_functions.py:speaks")


@pytest.mark.slow
def test_a_process_that_reads_no_more_holds_nobody_up() -> None:
    with FunctionPool(FunctionSettings(dirs=(TESTS,), timeout_s=1, processes=1)) as pool:
        process, stops = (
            pool.find(f"own_functions.py:{name}") for name in ("says_its_process", "stops_later")
        )
        pid = int(stops(trajectory()))
        until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        with pytest.raises(NoAnswer, match="timeout"):
            process(trajectory(padding="x" * (4 << 20)))
        assert process(trajectory()) != pid


@pytest.mark.slow
def test_to_stop_ends_all_processes_that_are_idle() -> None:
    pool = FunctionPool(FunctionSettings(dirs=(TESTS,), timeout_s=60, processes=2))
    process, both = pool.find("own_functions.py:says_its_process"), threading.Barrier(2)

    def call(_: int) -> int:
        both.wait()
        return int(process(trajectory()))

    with ThreadPoolExecutor(2) as threads:
        found = set[int]()
        while len(found) < 2:
            found |= set(threads.map(call, range(2)))
    pool.stop()
    assert [pid for pid in found if Path(f"/proc/{pid}").exists()] == []


def ended(pid: int) -> bool:
    """Return whether a process is gone, or is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def until(condition: Any) -> None:
    while not condition():
        time.sleep(0.01)


def test_to_stop_ends_what_runs_and_what_waits(tmp_path: Path) -> None:
    pool, begun = (
        FunctionPool(FunctionSettings(dirs=(TESTS,), timeout_s=3600, processes=1)),
        tmp_path / "pid",
    )
    waits, stopped = pool.find("own_functions.py:waits"), list[PoolStopped]()

    def call() -> None:
        try:
            waits(trajectory(begun=str(begun)))
        except PoolStopped as e:
            stopped.append(e)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: begun.exists() and begun.read_text())
    pool.stop()
    for thread in threads:
        thread.join()
    assert len(stopped) == 3
    pool.stop()  # as the reward job does: when it is asked to stop, and at its end
    until(lambda: ended(int(begun.read_text())))
    with pytest.raises(PoolStopped):
        waits(trajectory())


def test_to_stop_leaves_no_process_that_was_still_to_be_started() -> None:
    pool, starts = FunctionPool(FunctionSettings(dirs=(TESTS,), processes=1)), threading.Event()
    pool._starter.submit(starts.wait)  # the next call's process starts after it
    with ThreadPoolExecutor(2) as threads:
        try:
            call = threads.submit(pool.find, "own_functions.py:speaks")
            until(lambda: pool._starter._work_queue.qsize() == 1)
            stop = threads.submit(pool.stop)
            until(lambda: call.done() or stop.done())
            assert not stop.done(), "a process was still to be started"
            with pytest.raises(PoolStopped):
                call.result()
        finally:
            starts.set()
    assert stop.result() is None and not pool._children


def test_a_process_that_comes_back_behind_the_stop_is_ended() -> None:
    pool = FunctionPool(FunctionSettings(dirs=(TESTS,), processes=1))
    with pool._child() as child:
        pid = child._process.pid
        pool.stop()
    assert not Path(f"/proc/{pid}").exists() and not pool._children


PARENT = """
import sys
sys.path.insert(0, {unit!r})
from test_pool import FunctionPool, FunctionSettings, TESTS, trajectory
pool = FunctionPool(FunctionSettings(dirs=(TESTS,), timeout_s=3600))
pool.find("own_functions.py:waits")(trajectory(begun=sys.argv[1]))
"""


@pytest.mark.slow
def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    begun = tmp_path / "pid"
    code = PARENT.format(unit=str(Path(__file__).parent))
    parent = subprocess.Popen([sys.executable, "-c", code, str(begun)], cwd=ROOT)
    until(lambda: parent.poll() is not None or (begun.exists() and begun.read_text()))
    parent.kill()
    parent.wait()
    until(lambda: ended(int(begun.read_text())))


@pytest.mark.parametrize(
    ("named", "setting"),
    [
        ({"jobs": {"reward_functions": {"*": ["nowhere.py:f@1"]}}}, "jobs.reward_functions.*"),
        (
            {"jobs": {"quality_functions": {"r": ["own_functions.py:nothing@1"]}}},
            "jobs.quality_functions.r",
        ),
        ({"gateway": {"compute_reward": "no_such_module:f@1"}}, "gateway.compute_reward"),
    ],
)
def test_a_name_that_cannot_be_resolved_is_an_error_of_its_setting(
    named: dict[str, Any], setting: str
) -> None:
    settings = Settings.model_validate({**named, "functions": {"dirs": [str(TESTS)]}})
    (problem,) = problems_of(settings, ["gateway", "reward"])
    assert problem.startswith(f"setting {setting}: ")


@pytest.mark.slow
def test_names_that_are_there_are_no_error() -> None:
    jobs = {"reward_functions": {"*": ["own_functions.py:fails@1", "exact_match@1"]}}
    settings = Settings.model_validate({"jobs": jobs, "functions": {"dirs": [str(TESTS)]}})
    assert problems_of(settings, ["gateway", "reward"]) == []


@pytest.mark.slow
def test_a_pool_knows_whether_its_calls_are_in_time(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with FunctionPool(FunctionSettings(dirs=(TESTS,), timeout_s=3600)) as pool:
        waits = pool.find("own_functions.py:waits")
        assert not pool.in_time, "no call is in hand"
        with ThreadPoolExecutor(1) as thread:
            thread.submit(waits, trajectory(begun=str(begun)))
            while not begun.exists():
                time.sleep(0.01)
            assert pool.in_time
            (child,) = pool._children
            child.deadline = time.monotonic() - LATE_S
            assert not pool.in_time, "its thread should have given it up"
            pool.stop()
        assert not pool.in_time
