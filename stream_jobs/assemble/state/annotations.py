"""Rewards, curation marks and assessments of a trajectory. Pure."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from msgspec import Struct, field
from msgspec.structs import replace

from clawstream.schemas.records import RewardSource

REWARDS_MAX = 10_000
MARKS_MAX = 10_000
"""Maximum number of rewards and of curation marks per trajectory. Bounds the state against writers
whose names or event ids keep changing.
"""
NO_OFFSET = -1
"""Offset of an annotation whose topic was replaced: every record of the new topic is later."""
AT_END = 1 << 62
"""Offset of the rewards of a completion: every record of `claw.rewards` is earlier. So the first
record there counts, as without them, and the lake need not read session events for its rewards.
"""


class CurrentReward(Struct, frozen=True, array_like=True, tag="r"):
    """The reward that counts for its slot. step_suffix: None for the whole trajectory. offset: on
    `claw.rewards`, or NO_OFFSET, or AT_END.
    """

    source: RewardSource
    name: str
    version: str
    step_suffix: str | None
    value: float | None
    reason: str | None
    revision: int
    offset: int = NO_OFFSET

    @property
    def slot(self) -> tuple[str, str, str | None]:
        return self.source, self.name, self.step_suffix


class CurationMark(Struct, frozen=True, array_like=True, tag="q"):
    """A curation of one target. event: hash of its event id. step_suffix: "" for the whole
    trajectory. A field that is None says nothing. offset: on `claw.rewards`, or NO_OFFSET.
    takes_back: hash of the event id of a mark that no longer counts.
    """

    event: int
    step_suffix: str
    quality: float | None
    trainable: bool | None
    tags: list[str] | None
    offset: int
    takes_back: int | None = None


class AssessmentState(Struct, frozen=True, array_like=True, tag="e"):
    """Result of the quality rules: quality of the trajectory, and of each step by its index in the
    closed trajectory.
    """

    revision: int
    quality: float | None
    steps: list[float]


Annotation = CurrentReward | CurationMark | AssessmentState


class CurrentRewards(list[CurrentReward]):
    """The rewards that count, with a lookup table by slot, which is not stored."""

    __slots__ = ("_positions",)

    def __init__(self, rewards: Iterable[CurrentReward] = ()) -> None:
        super().__init__(rewards)
        self._positions = {reward.slot: at for at, reward in enumerate(self)}

    def of(self, reward: CurrentReward) -> CurrentReward | None:
        """Return the reward that counts for the slot of `reward`."""
        at = self._positions.get(reward.slot)
        return self[at] if at is not None else None

    def put(self, reward: CurrentReward) -> None:
        """Make a reward the one that counts for its slot."""
        at = self._positions.setdefault(reward.slot, len(self))
        self[at : at + 1] = [reward]


class CurationState(Struct, array_like=True):
    """Curation of one target. Of each field the last value counts.

    marks: the marks that count, in log order. taken_back: hashes of the event ids of the marks that
    were taken back.
    """

    marks: list[CurationMark] = field(default_factory=list)
    taken_back: set[int] = field(default_factory=set)

    @property
    def quality(self) -> float | None:
        return next((m.quality for m in reversed(self.marks) if m.quality is not None), None)

    @property
    def trainable(self) -> bool | None:
        return next((m.trainable for m in reversed(self.marks) if m.trainable is not None), None)

    @property
    def tags(self) -> list[str] | None:
        return next((m.tags for m in reversed(self.marks) if m.tags is not None), None)

    def apply(self, mark: CurationMark) -> None:
        """Apply a mark. Marks may be applied out of log order."""
        if mark.takes_back is not None:
            self.taken_back.add(mark.takes_back)
            self.marks = [m for m in self.marks if m.event != mark.takes_back]
        elif mark.event not in self.taken_back:
            insort(self.marks, mark, key=lambda m: m.offset)


class Annotations(Struct, array_like=True):
    """Rewards, curation by step suffix ("" for the trajectory) and assessment of a trajectory.
    seen: hashes of curation event ids, to ignore duplicates.
    """

    rewards: CurrentRewards = field(default_factory=CurrentRewards)
    marks: dict[str, CurationState] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    assessed: AssessmentState | None = None

    def accepts(self, annotation: Annotation) -> bool:
        """Return whether an annotation changes the state.

        Of rewards in a slot, and of assessments, the highest revision counts; then the reward with
        the lowest offset, because rewards may wait for different steps of one trajectory, and the
        first assessment.
        """
        match annotation:
            case CurrentReward():
                old = self.rewards.of(annotation)
                order = (annotation.revision, -annotation.offset)
                return old is None or order > (old.revision, -old.offset)
            case CurationMark():
                return annotation.event not in self.seen
            case AssessmentState():
                return self.assessed is None or annotation.revision > self.assessed.revision

    def confirms(self, annotation: Annotation) -> bool:
        """Return whether an annotation only repeats the content of the reward that counts."""
        if not isinstance(annotation, CurrentReward):
            return False
        old = self.rewards.of(annotation)
        return old is not None and replace(old, offset=annotation.offset) == annotation

    def add(self, annotation: Annotation) -> None:
        """Add an annotation, if it changes the state."""
        if not self.accepts(annotation):
            return
        match annotation:
            case CurrentReward():
                self.rewards.put(annotation)
            case CurationMark():
                self.seen.add(annotation.event)
                self.marks.setdefault(annotation.step_suffix, CurationState()).apply(annotation)
            case AssessmentState():
                self.assessed = annotation

    def limit_reached(self, annotation: Annotation) -> str | None:
        """Describe the limit that prevents an annotation; None if there is room. Replacements
        always fit.
        """
        match annotation:
            case CurrentReward() if len(self.rewards) >= REWARDS_MAX:
                full = self.rewards.of(annotation) is None
                return f"{REWARDS_MAX} rewards by source, name and step" if full else None
            case CurationMark() if len(self.seen) >= MARKS_MAX:
                return f"{MARKS_MAX} curation marks"
        return None

    def forget_offsets(self) -> None:
        """Drop all offsets: the topic was replaced."""
        self.rewards = CurrentRewards(replace(r, offset=NO_OFFSET) for r in self.rewards)
        for state in self.marks.values():
            state.marks = [replace(m, offset=NO_OFFSET) for m in state.marks]
