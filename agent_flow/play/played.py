"""Which groups of a flow have been played: files that survive the process.

A directory belongs to one flow of one run. Its file `id` is a part of every group's id, so groups
of another directory never have the same trajectories. Each process has a file of its own, named by
its shard, and reads those of all. A line is an event:

1. `began`: a group of a task
2. `opened`: a trajectory, before the gateway knows of it
3. `ending`: how a trajectory ends, before the gateway knows; the last one counts
4. `ended`: the gateway has recorded the end
5. `done`: all rollouts of the group have ended

A process that dies leaves groups without `done`. The next one of its shard sends the ends that are
in doubt again, which changes nothing where they are recorded. If all members of a group have an end
then, it is done. Else its other trajectories are abandoned, and its task is played in a new group.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawstream.agent_flow.errors import FlowError
from clawstream.agent_flow.gateway.client import Place
from clawstream.agent_flow.outcome import Outcome, Reward

STOPPED = "stopped"
"""Reason of the end of a rollout that was cut: another group replaces its own."""


@dataclass(slots=True)
class Trajectory:
    """A trajectory of a group without `done`. end: outcome, reward and reason."""

    place: Place
    end: tuple[Outcome, Reward, str | None] | None = None
    is_recorded: bool = False

    @property
    def is_final(self) -> bool:
        """Whether its place in the group needs no other rollout."""
        return self.end is not None and self.end[0] != "replaced" and self.end[2] != STOPPED


class Played:
    """The groups that have been played.

    Attributes:
        directory: None: nothing is remembered, and every call of the command plays all tasks.
        flow_id: Part of the id of each group.
        in_doubt: Trajectories of an earlier process whose end is not known to be recorded.
    """

    def __init__(self, directory: Path | None, shard: tuple[int, int] = (0, 1)) -> None:
        """Read what earlier processes have played.

        Raises:
            FlowError: A process with this shard plays the flow already, or the directory cannot be
                written.
        """
        self.directory, self.flow_id = directory, secrets.token_hex(4)
        self.in_doubt = list[Trajectory]()
        self._done, self._groups, self._file = set[str](), Counter[str](), -1
        if directory is None:
            return
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.flow_id = _written_once(directory / "id", self.flow_id)
            own = directory / f"{shard[0]}-of-{shard[1]}.jsonl"
            self._file = os.open(own, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            if not _is_locked(self._file):
                raise FlowError(
                    f"shard={shard[0]}/{shard[1]} of this flow is played by another process; give "
                    "each its shard=I/N"
                )
            os.write(self._file, b"\n")  # ends a line that a crash has cut
            for path in sorted(directory.glob("*.jsonl")):
                self._read(path, path == own)
        except OSError as error:
            raise FlowError(f"state={directory}: {error}") from error

    def close(self) -> None:
        """Let another process play this shard. Nothing is noted any more."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    @property
    def done(self) -> int:
        """Number of groups that earlier processes have played."""
        return len(self._done)

    def is_done(self, task: str) -> bool:
        """Return whether a group of a task has been played. task: its epoch and id."""
        return task in self._done

    def begin(self, task: str, group: str) -> str:
        """Note that a group of a task begins; return its id, another one for each time."""
        again = self._groups[task]
        self._groups[task] += 1
        name = f"{group}-r{again}" if again else group
        self._write("began", task, name)
        return name

    def end(self, task: str) -> None:
        """Note that all rollouts of the group of a task have ended."""
        self._write("done", task)

    def opened(self, place: Place) -> None:
        """Note that a trajectory is about to be opened."""
        fields = (place.key, place.group, place.group_size, place.channel, place.run)
        self._write("opened", *fields)

    def ending(
        self, place: Place, outcome: Outcome, reward: Reward = None, reason: str | None = None
    ) -> None:
        """Note how a trajectory is about to end."""
        given = dict(reward) if isinstance(reward, Mapping) else reward
        self._write("ending", place.key, outcome, given, reason)

    def ended(self, place: Place) -> None:
        """Note that the end of a trajectory is recorded."""
        self._write("ended", place.key)

    def _write(self, *event: Any) -> None:
        """Append an event. Raises FlowError: without it a key could name two trajectories."""
        if self._file < 0:
            return
        line = json.dumps(event).encode() + b"\n"
        try:
            if os.write(self._file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise FlowError(f"state={self.directory}: {error}") from error

    def _read(self, path: Path, is_own: bool) -> None:
        trajectories, tasks = dict[str, Trajectory](), dict[str, str]()
        for line in path.read_bytes().splitlines():
            try:
                kind, first, *fields = json.loads(line)
            except ValueError:  # empty, or the machine went down in the middle of it
                continue
            if kind == "began":
                self._groups[first] += 1
                tasks[fields[0]] = first
            elif kind == "done":
                self._done.add(first)
            elif kind == "opened":
                trajectories[first] = Trajectory(Place(first, *fields))
            elif (known := trajectories.get(first)) is None:  # its line was lost in a crash
                continue
            elif kind == "ending":
                known.end = tuple(fields)
            else:
                known.is_recorded = True
        if is_own:  # another process may be playing what is in its file
            self._resume(trajectories.values(), tasks)

    def _resume(self, trajectories: Iterable[Trajectory], tasks: Mapping[str, str]) -> None:
        """Find the groups without `done` that are whole, and what is in doubt.

        Args:
            trajectories: That were opened.
            tasks: Task of each group that began.
        """
        final = Counter[str]()
        for one in trajectories:
            final[one.place.group] += one.is_final
            if not one.is_recorded:
                self.in_doubt.append(one)
            task = tasks.get(one.place.group)  # other agents have groups of their own
            if task is not None and final[one.place.group] == one.place.group_size:
                self._done.add(task)


def _written_once(path: Path, text: str) -> str:
    """Write a file unless it exists; return its text."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    new.write_text(text)
    try:
        os.link(new, path)
    except FileExistsError:
        pass
    finally:
        new.unlink()
    return path.read_text()


def _is_locked(file: int) -> bool:
    """Lock a file for the life of this process; return whether no other process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
