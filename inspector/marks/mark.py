"""A mark: what a person says about trajectories and steps, as events of `claw.rewards`. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from clawstream.inspector.errors import InvalidMark
from clawstream.schemas.ids import (
    check_run_id,
    check_trajectory_key,
    is_gateway_assigned,
    key_of_trajectory,
    new_event_id,
)
from clawstream.schemas.records import Curation, Reward
from clawstream.schemas.records.parts import NAME_CHARS, TAGS_MAX
from clawstream.schemas.records.rewards import out_of_bounds

NOTE_CHARS = 2000
FUNCTION_VERSION = "1"
"""Version of the rewards that people give."""
Event = Curation | Reward


class Target(NamedTuple):
    """The target of a mark. step_id: None for the whole trajectory.

    admitted: the trajectory is in a batch already, so a mark comes too late for training.
    """

    run_id: str
    trajectory_id: str
    step_id: str | None = None
    admitted: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """Values to set; None keeps a value. Raises InvalidMark.

    reward: the human reward `human/<reward_name>`.
    """

    by: str
    quality: float | None = None
    trainable: bool | None = None
    tags: tuple[str, ...] | None = None
    note: str | None = None
    reward: float | None = None
    reward_name: str = "rating"

    def __post_init__(self) -> None:
        if not self._is_curation and self.reward is None:
            raise InvalidMark(
                "the mark is empty: give a quality, trainable, a tag, a note or a reward"
            )
        if self.quality is not None and not 0 <= self.quality <= 1:
            raise InvalidMark(f"quality: {self.quality:g} is not in [0, 1]")
        if len(self.tags or ()) > TAGS_MAX or any(
            not 0 < len(tag) <= NAME_CHARS for tag in self.tags or ()
        ):
            raise InvalidMark(f"tags: at most {TAGS_MAX}, each of 1 to {NAME_CHARS} characters")
        if len(self.note or "") > NOTE_CHARS:
            raise InvalidMark(f"note: at most {NOTE_CHARS} characters")
        if self.reward is not None and (why := out_of_bounds(self.reward)) is not None:
            raise InvalidMark(f"reward: {why}")
        if not 0 < len(self.reward_name) <= NAME_CHARS:
            raise InvalidMark(f"reward_name: 1 to {NAME_CHARS} characters")

    @property
    def _is_curation(self) -> bool:
        said = (self.quality, self.trainable, self.tags, self.note)
        return any(value is not None for value in said)

    def events(self, target: Target, at: int) -> Iterator[Event]:
        """Yield the events for a target.

        Args:
            target: What is marked.
            at: Time of the mark, microseconds since the epoch. All events of one action of a person
                have the same.

        Raises:
            InvalidMark: A mark of the target would not count.
        """
        place = place_of(target)
        if self._is_curation:
            yield Curation(
                event_id=new_event_id(), quality=self.quality, trainable=self.trainable,
                tags=self.tags, note=self.note, by=self.by, created_at=at, **place,
            )  # fmt: skip
        if self.reward is not None:
            yield Reward(
                event_id=new_event_id(), source="human", name=self.reward_name,
                function_version=FUNCTION_VERSION, value=self.reward, reward_revision=at,
                by=self.by, created_at=at, **place,
            )  # fmt: skip


def place_of(target: Target) -> dict[str, Any]:
    """Return the fields of an event that name its target.

    Raises:
        InvalidMark: An open session of the gateway is marked as a whole: it may become many
            trajectories.
        InvalidId: The run or the trajectory has no valid id.
    """
    check_run_id(target.run_id)
    key = check_trajectory_key(key_of_trajectory(target.trajectory_id))
    assigned = is_gateway_assigned(key)
    if assigned and target.trajectory_id == key and target.step_id is None:
        raise InvalidMark(f"{key} is open and may become many trajectories: mark a step of it")
    named = assigned and target.trajectory_id != key
    return {
        "run_id": target.run_id,
        "trajectory_key": key,
        "trajectory_id": target.trajectory_id if named else None,
        "step_id": target.step_id,
    }
