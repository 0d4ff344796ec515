"""The grouping of assemble and admit in dictionaries: nothing is checked, stored or durable."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from clawstream.schemas.records import Reward, SessionEvent, Step


@dataclass(slots=True)
class Pool:
    """Steps by trajectory, trajectories by group, rewards.

    A group is ready when all its trajectories are completed and rewarded.
    """

    steps: dict[str, list[Step]] = field(default_factory=dict)
    opened: dict[str, SessionEvent] = field(default_factory=dict)
    groups: dict[str, list[str]] = field(default_factory=dict)
    completed: set[str] = field(default_factory=set)
    rewards: dict[str, Reward] = field(default_factory=dict)

    def take(self, event: Any) -> Iterator[list[tuple[list[Step], Reward]]]:
        """Add an event; yield the group that it makes ready."""
        key = event.trajectory_key
        match event:
            case Step():
                self.steps.setdefault(key, []).append(event)
                return
            case SessionEvent(kind="opened"):
                self.opened[key] = event
                self.groups.setdefault(event.group_id or key, []).append(key)
                return
            case SessionEvent():
                self.completed.add(key)
            case Reward():
                self.rewards[key] = event
        opened = self.opened[key]
        members = self.groups[opened.group_id or key]
        if len(members) == opened.group_size and all(
            m in self.completed and m in self.rewards for m in members
        ):
            del self.groups[opened.group_id or key]
            yield [self._served(m) for m in members]

    def _served(self, key: str) -> tuple[list[Step], Reward]:
        del self.opened[key]
        self.completed.remove(key)
        return self.steps.pop(key), self.rewards.pop(key)
