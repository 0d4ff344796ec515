"""Groups of trajectories before admission, and the verdict: wait, refuse, or train. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from clawstream.schemas.algorithms import smallest_group
from clawstream.schemas.records import (
    AdmissionPolicy,
    BatchGroup,
    BatchMember,
    Candidate,
    Channel,
    Place,
)
from clawstream.schemas.reward_matching import training_reward
from clawstream.schemas.topics import MAX_MESSAGE_BYTES, MAX_RECORD_BYTES
from clawstream.stream_jobs.admit.eligibility import (
    Ineligibility,
    ineligibilities,
    is_stale,
    missing_input,
    staleness_of,
    trained_part,
)

GroupKey = tuple[str, int]
"""Group id and round."""
MAX_GROUP_BYTES = MAX_MESSAGE_BYTES - 1024 * 1024
"""Limit of a group that is alone in its batch.

The rest of the message is for the other fields of the batch, above all the reward weights.
"""
_GROUP_BYTES, _MEMBER_BYTES, _REWARD_BYTES, _STEP_BYTES, _REFUSED_BYTES = 24, 80, 24, 3, 20
"""Upper bounds of the bytes in Avro, without strings and without the revision of a reward."""


@dataclass(slots=True)
class Member:
    """A closed trajectory at its highest revision. first_offset: of its first candidate record.

    whole: As received. candidate: The part that the policy trains. ineligibility: Why it cannot be
    trained. missing_input: A required reward or assessment that has not arrived.
    """

    whole: Candidate
    place: Place | None
    first_offset: int
    ineligibility: Ineligibility | None = None
    missing_input: Ineligibility | None = None
    candidate: Candidate = field(init=False)
    _size: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.candidate = self.whole

    def apply_policy(self, policy: AdmissionPolicy) -> None:
        """Compute the trained part, ineligibility and missing input under this policy."""
        self.candidate, self._size = trained_part(self.whole, policy), None
        self.ineligibility = next(
            ineligibilities(self.candidate, policy, self.place is not None), None
        )
        self.missing_input = (
            missing_input(self.candidate, policy) if self.ineligibility is None else None
        )

    @property
    def size(self) -> int:
        """Upper bound of its bytes in a batch."""
        if self._size is None:
            c = self.candidate
            texts = [
                c.trajectory_id,
                c.trajectory_key,
                self.place.topic_id if self.place is not None else "",
                c.traceparent or "",
            ]
            untrained = [s.step_id for s in c.steps if not s.trainable]
            revisions = 0
            for r in c.rewards:
                revisions += r.reward_revision.bit_length() // 7 + 1
                texts += (r.name, r.function_version, r.step_id or "", r.reason or "")
            counted = (
                _MEMBER_BYTES
                + _REWARD_BYTES * len(c.rewards)
                + _STEP_BYTES * len(untrained)
                + revisions
            )
            self._size = counted + sum(map(_bytes, texts)) + sum(map(_bytes, untrained))
        return self._size


class Verdict(NamedTuple):
    """The decision on a group: `refusal` with `detail`, or train `usable` and drop the others."""

    usable: tuple[Member, ...]
    dropped: tuple[tuple[Member, Ineligibility], ...]
    refusal: str | None = None
    detail: str | None = None

    @property
    def tokens(self) -> int:
        """Trainable tokens of the usable members."""
        return sum(m.candidate.trainable_tokens for m in self.usable)

    @property
    def size(self) -> int:
        """Upper bound of the bytes of the usable members in a batch."""
        return sum(m.size for m in self.usable)

    @property
    def oldest_sync_index(self) -> int | None:
        """Lowest sync index among the trainable tokens of the usable members; None when none has
        one.
        """
        return min(
            (s for m in self.usable if (s := m.candidate.oldest_sync_index) is not None),
            default=None,
        )


@dataclass(slots=True)
class Group:
    """One undecided round of a group id.

    refused_members: Members refused one by one before. closed_to_new_at: Log time of its deadline;
    it takes no more members. batch, entered_at: The open batch that holds it when ready, and since
    when. tokens, size: Its share of that batch.
    """

    key: GroupKey
    n: int
    members: dict[str, Member] = field(default_factory=dict)
    refused_members: int = 0
    awaiting_input: int = 0
    first_closed_at: int = 0
    last_closed_at: int = 0
    closed_to_new_at: int | None = None
    verdict: Verdict | None = None
    batch: int | None = None
    entered_at: int = 0
    tokens: int = 0
    size: int = 0

    @property
    def arrived(self) -> int:
        """Members that have arrived, including refused ones."""
        return len(self.members) + self.refused_members

    @property
    def closed_to_new(self) -> bool:
        """Whether the next trajectory belongs to the next round."""
        return self.closed_to_new_at is not None or self.arrived >= self.n

    def put(self, member: Member) -> None:
        """Add a member, or a new revision of one."""
        tid = member.candidate.trajectory_id
        old = self.members.get(tid)
        self.awaiting_input += (member.missing_input is not None) - (
            old is not None and old.missing_input is not None
        )
        closed_at = member.candidate.closed_at
        self.first_closed_at = min(self.first_closed_at, closed_at) if self.members else closed_at
        self.last_closed_at = max(self.last_closed_at, closed_at)
        self.members[tid] = member

    def apply_policy(self, policy: AdmissionPolicy) -> None:
        """Apply another policy to every member."""
        for member in self.members.values():
            member.apply_policy(policy)
        self.awaiting_input = sum(m.missing_input is not None for m in self.members.values())

    def size_with(self, verdict: Verdict) -> int:
        """Upper bound of its bytes in a batch, with the usable members of a verdict."""
        return verdict.size + _GROUP_BYTES + _bytes(self.key[0])

    def deadline(self, policy: AdmissionPolicy) -> int:
        """Event time (ms) from which the group no longer waits for members."""
        return self.first_closed_at + policy.group_deadline_ms

    def reward_deadline(self, policy: AdmissionPolicy) -> int:
        """Event time (ms) from which it no longer waits for rewards.

        It counts from the last closing, since a comparison needs all members.
        """
        return self.last_closed_at + policy.reward_deadline_ms


@dataclass(frozen=True, slots=True)
class ClosedMember:
    """A closed trajectory of a group.

    place: Of its payload; None: it has none. staleness: With which it was decided, versions; None:
    it is undecided, or the staleness was unknown.
    """

    candidate: Candidate
    place: Place | None = None
    staleness: int | None = None


def evaluate_group(
    group: Group, policy: AdmissionPolicy, channel: Channel, now: int | None, ended: bool = False
) -> Verdict | None:
    """Return the verdict, or None while the group waits for members or rewards.

    Costs O(1) while it waits for a member. Does not check staleness, which depends on the batch:
    `AdmissionFold` does.

    Args:
        now: Event time, ms; None before the first.
        ended: The run has ended; no group waits.
    """
    sealed = (
        group.closed_to_new_at is not None
        or ended
        or (now is not None and now >= group.deadline(policy))
    )
    if not sealed and group.arrived < group.n:
        return None
    if not sealed and group.awaiting_input and (now is None or now < group.reward_deadline(policy)):
        return None
    usable, dropped = [], []
    for tid in sorted(group.members):
        member = group.members[tid]
        lack = member.ineligibility or member.missing_input
        if lack is None:
            usable.append(member)
        else:
            dropped.append((member, lack))
    least = min(policy.min_members, group.n)
    if channel == "train":  # whatever n is: an agent may have opened a group of one
        least = max(least, smallest_group(policy.algorithm))
    if len(usable) < least:
        reasons = Counter(lack.reason for _, lack in dropped)
        detail = f"{len(usable)} of {group.n} usable, {least} needed" + "".join(
            f"; {count} {reason}" for reason, count in sorted(reasons.items())
        )
        absent = group.n - group.arrived
        if absent > 0:
            detail += f"; {absent} never came"
        return Verdict((), (), _too_few(group, reasons, ended), detail)
    if channel == "train" and policy.drop_zero_variance and group.n > 1:
        rewards = {
            r
            for m in usable
            if (r := training_reward(policy.reward_weights, m.candidate.rewards)) is not None
        }
        if len(rewards) <= 1:
            what = (
                f"all {rewards.pop():g}"
                if rewards
                else "none: name what is trained on in required_rewards"
            )
            return Verdict((), (), "zero_variance", f"rewards of {len(usable)} members: {what}")
    verdict = Verdict(tuple(usable), tuple(dropped))
    if (size := group.size_with(verdict)) > MAX_GROUP_BYTES:
        values = sum(len(m.candidate.rewards) for m in usable)
        detail = (
            f"{len(usable)} members with {values} rewards are {size} bytes, one record takes "
            f"{MAX_GROUP_BYTES}"
        )
        return Verdict((), (), "too_large", detail)
    return verdict


def refusals(
    members: Sequence[ClosedMember], policy: AdmissionPolicy, newest: int | None
) -> list[str | None]:
    """Return why admission would refuse each member of a group of channel `train`.

    The group is decided with these members, as if its deadline had passed. A refused group gives
    its reason to all of them, as in the journal.

    Args:
        members: All of one round.
        policy: The policy that decides.
        newest: Sync index of the newest version, for members without a staleness of their own.

    Returns:
        A reason for each member, in order; None: it is admitted.
    """
    # A replaced trajectory is no member of its group.
    closed = {
        member.candidate.trajectory_id: member
        for member in members
        if member.candidate.outcome != "replaced"
    }
    sizes = [m.candidate.group_size for m in closed.values() if m.candidate.group_size is not None]
    group = Group(("", 0), max(1, sizes[0] if sizes else policy.group_size), closed_to_new_at=0)
    for member in closed.values():
        joining = Member(member.candidate, member.place, 0)
        joining.apply_policy(policy)
        group.put(joining)
    verdict = evaluate_group(group, policy, "train", None)
    assert verdict is not None, "a closed group waits for nothing"
    refusal = verdict.refusal
    for usable in verdict.usable:
        staleness = closed[usable.candidate.trajectory_id].staleness
        if staleness is None:
            staleness = staleness_of(usable.candidate.oldest_sync_index, newest)
        if is_stale(staleness, policy):
            refusal = "stale"
    dropped = {member.candidate.trajectory_id: lack.reason for member, lack in verdict.dropped}
    return [
        refusal or dropped.get(member.candidate.trajectory_id)
        if member.candidate.trajectory_id in closed
        else "replaced"
        for member in members
    ]


def split_by_record_size(members: Sequence[Candidate]) -> list[list[Candidate]]:
    """Split the members of a refused group into parts that fit into one record each."""
    parts: list[list[Candidate]] = [[]]
    size = 0
    for c in members:
        texts = _bytes(c.trajectory_id) + _bytes(c.traceparent or "")
        size += (taken := _REFUSED_BYTES + texts)
        if size > MAX_RECORD_BYTES:
            parts.append([])
            size = taken
        parts[-1].append(c)
    return parts


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _too_few(group: Group, reasons: Counter[str], ended: bool) -> str:
    if ended:
        return "run_ended"
    if group.arrived < group.n or not reasons:
        return "incomplete"
    return min(reasons, key=lambda r: (-reasons[r], r))


def to_batch_group(group: Group, members: Iterable[Member]) -> BatchGroup:
    """Convert the group to its record in a batch."""
    return BatchGroup(
        group_id=group.key[0],
        round=group.key[1],
        n=group.n,
        members=tuple(map(_batch_member, members)),
    )


def _batch_member(member: Member) -> BatchMember:
    c = member.candidate
    if member.place is None:
        raise ValueError(f"trajectory {c.trajectory_id}: a usable member must have a place")
    return BatchMember(
        trajectory_id=c.trajectory_id,
        trajectory_key=c.trajectory_key,
        revision=c.revision,
        place=member.place,
        rewards=c.rewards,
        untrainable_steps=tuple(s.step_id for s in c.steps if not s.trainable),
        trainable_tokens=c.trainable_tokens,
        oldest_sync_index=c.oldest_sync_index,
        traceparent=c.traceparent,
    )
