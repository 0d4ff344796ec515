"""The memory of a flow: what a process that dies leaves, and the next one reads."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from clawstream.agent_flow.errors import FlowError
from clawstream.agent_flow.gateway.client import Place
from clawstream.agent_flow.play.played import Played

FILE = "0-of-1.jsonl"


def place(key: str, group: str) -> Place:
    return Place(key, group, 1, "train", "run")


def left(directory: Path) -> tuple[list[str], list[str]]:
    """Return the tasks of a, b and c that are done, and the keys in doubt."""
    played = Played(directory)
    played.close()
    return [t for t in "abc" if played.is_done(t)], [one.place.key for one in played.in_doubt]


def test_a_line_that_a_crash_has_cut_costs_only_itself(tmp_path: Path) -> None:
    first = Played(tmp_path)
    assert first.begin("a", "g") == "g"
    first.close()
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'["opened", "g-0", "g"')
    second = Played(tmp_path)
    assert second.begin("a", "g") == "g-r1"
    second.opened(place("g-r1-0", "g-r1"))
    second.close()
    assert left(tmp_path) == ([], ["g-r1-0"])
    third = Played(tmp_path)
    assert third.begin("a", "g") == "g-r2"  # not the id of a group that was played
    third.close()


def test_a_file_that_takes_no_more_ends_the_flow(tmp_path: Path) -> None:
    played = Played(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, limits[1]))
    try:
        with pytest.raises(FlowError, match=f"state={tmp_path}: "):
            played.begin("a", "g")  # 4 bytes of its line are written
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    played.close()
    assert left(tmp_path) == ([], [])


def test_the_end_of_a_trajectory_whose_opening_was_lost_is_passed_over(tmp_path: Path) -> None:
    first = Played(tmp_path)
    first.begin("a", "g")
    first.opened(place("g-0", "g"))
    first.ending(place("g-0", "g"), "completed", 1.0)
    first.ended(place("g-0", "g"))
    first.begin("b", "h")
    first.opened(place("h-0", "h"))
    first.close()
    lines = (tmp_path / FILE).read_bytes().splitlines(keepends=True)
    lines[1] = b"\0" * (len(lines[1]) - 1) + b"\n"  # it never reached the disk
    (tmp_path / FILE).write_bytes(b"".join(lines))
    assert left(tmp_path) == ([], ["h-0"])
