"""User-written functions, correct and faulty, for tests of the processes that run them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from clawstream.rewards.quality.score import Score
from clawstream.schemas.records import Trajectory
from clawstream.schemas.tokens import unpack_ids
from clawstream.schemas.user_function import batched


def by_turns(trajectory: Trajectory) -> dict[str, float]:
    said = json.loads(trajectory.metadata_json or b"{}")
    return {trajectory.steps[0].step_id: said["num_turns"] + said["extra_fields"]["bonus"]}


def of_nothing(trajectory: Trajectory) -> None:
    assert unpack_ids(trajectory.segments[1].token_ids) == [1]


def loops(trajectory: Trajectory) -> float:
    while trajectory:
        pass
    return 0.0


def crashes(trajectory: Trajectory) -> float:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0.0


def exits(trajectory: Trajectory) -> float:
    sys.exit(3)


def fails(trajectory: Trajectory) -> float:
    raise ValueError("no")


def speaks(trajectory: Trajectory) -> float:
    print("to standard output")
    return 0.5


def scores(trajectory: Trajectory) -> list[Score]:
    return [Score(0.25, "odd", trajectory.steps[0].step_id)]


def says_its_process(trajectory: Trajectory) -> float:
    return float(os.getpid())


def stops_later(trajectory: Trajectory) -> float:
    """Return the pid of its process, which stops after the answer."""
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    return float(os.getpid())


def of_answers(trajectory: Trajectory) -> float:
    """Follow the last reply: loop, crash, wait, eat memory, or return the reply as the reward."""
    said = json.loads(trajectory.steps[-1].response_json)["content"]
    known = {"loop": loops, "crash": crashes, "wait": waits, "eat": eats}
    return known.get(said, lambda _: float(said))(trajectory)


def waits(trajectory: Trajectory) -> float:
    """Report its start in the file that the metadata names, then wait forever."""
    Path(json.loads(trajectory.metadata_json or b"{}")["begun"]).write_text(str(os.getpid()))
    while True:
        time.sleep(3600)


def eats(trajectory: Trajectory) -> float:
    return float(len(bytearray(1 << 40)))


def not_a_number(trajectory: Trajectory) -> float:
    return float("nan")


def told(trajectory: Trajectory) -> str:
    """Return what the test put into the metadata."""
    return str(json.loads(trajectory.metadata_json or b"{}").get("told", "0.5"))


async def waits_together(trajectory: Trajectory) -> float:
    """Follow the metadata: wait for ever, block the event loop, or return a number."""
    do = told(trajectory)
    if do == "sleep":
        await asyncio.sleep(3600)
    if do == "block":
        loops(trajectory)
    return float(do)


class Endless:
    """An async function of another form, which ignores that it is cancelled."""

    async def __call__(self, trajectory: Trajectory) -> float:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue


endless = Endless()


@batched(3)
def by_batch(trajectories: list[Trajectory]) -> list[float]:
    """Return the size of the batch. A trajectory can request an exception or a crash."""
    for do in map(told, trajectories):
        if do == "crash":
            crashes(trajectories[0])
        if do == "raise":
            raise ValueError("not this one")
    return [float(len(trajectories))] * len(trajectories)


@batched(3)
async def too_few(trajectories: list[Trajectory]) -> list[float]:
    return []


def configured(given: dict[str, float]) -> Callable[[Trajectory], float]:
    return lambda _: given["value"]


class NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("\ud800")


def anything(trajectory: Trajectory) -> object:
    """Return, or raise, what no reward function should; it follows from the trajectory's id."""
    answers = [
        -sys.float_info.max, sys.float_info.max, float("nan"), float("-inf"), 10**400, 1e6, 1000001,
        "\ud800", "1" * 100_000, [1.0, {"\ud800": float("nan")}], (1.0, {"x": 10**400}), {},
        object(),
        {"no step": 1.0}, {trajectory.steps[0].step_id if trajectory.steps else "": 1e300}, b"\xff",
        [[[1.0]]], True, NoText(), ValueError("\udfff" * 3000), RecursionError(), KeyError("\x00"),
    ]  # fmt: skip
    answer = answers[sum(trajectory.trajectory_id.encode()) % len(answers)]
    if isinstance(answer, Exception):
        raise answer
    return answer
