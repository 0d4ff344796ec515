"""User-written functions, correct and faulty, for tests of the processes that run them."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from rewards.quality.score import Score
from schemas.records import Trajectory
from schemas.tokens import unpack_ids


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
    """Follow the last reply: loop, crash, wait, or return the reply as the reward."""
    said = json.loads(trajectory.steps[-1].response_json)["content"]
    return {"loop": loops, "crash": crashes, "wait": waits}.get(said, lambda _: float(said))(
        trajectory
    )


def waits(trajectory: Trajectory) -> float:
    """Report its start in the file that the metadata names, then wait forever."""
    Path(json.loads(trajectory.metadata_json or b"{}")["begun"]).write_text(str(os.getpid()))
    while True:
        time.sleep(3600)
