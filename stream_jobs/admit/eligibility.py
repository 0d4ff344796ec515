"""Decide whether a closed trajectory can be trained under a policy, and why not. Pure.

`trained_part` selects the trained steps, `ineligibilities` lists permanent obstacles and
`missing_input` an input that may still arrive. Admission refuses with the first ineligibility.
`staleness_refusal` depends on the batch: the fold checks it last. `readiness` lists all conditions,
for SQL.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from clawstream.schemas.records import AdmissionPolicy, Candidate, CandidateStep, Channel
from clawstream.schemas.records.rewards import out_of_bounds
from clawstream.schemas.reward_matching import missing, training_reward, valueless, weighted_sum


class Ineligibility(NamedTuple):
    """An unmet condition: the reason as a refusal names it, and details with numbers."""

    reason: str
    detail: str | None = None


class Readiness(NamedTuple):
    """Readiness of a trajectory, named like the columns of the SQL view `readiness`.

    unmet_conditions: In the order in which admission refuses for them. awaiting_input: The only one
    is an input that may still arrive. staleness: Versions from its oldest trainable token to the
    newest version.
    """

    unmet_conditions: tuple[str, ...]
    awaiting_input: bool
    staleness: int | None
    trainable_tokens: int
    training_reward: float | None


def staleness_of(oldest_sync_index: int | None, trains: int | None) -> int | None:
    """Return the versions between the oldest token and the trained version; None: unknown."""
    return None if oldest_sync_index is None or trains is None else trains - oldest_sync_index


def is_stale(staleness: int | None, policy: AdmissionPolicy) -> bool:
    """Return whether a staleness, in versions, exceeds the policy's limit."""
    limit = policy.max_staleness
    return limit is not None and staleness is not None and staleness > limit


def staleness_refusal(
    oldest_sync_index: int | None, batch_seq: int, policy: AdmissionPolicy
) -> str | None:
    """Return why a group is too stale for a batch, or None.

    Args:
        oldest_sync_index: of all trained tokens of the group.
        batch_seq: number of the batch, which is trained on version `batch_seq // sync_every`.
    """
    trains = batch_seq // policy.sync_every
    if not is_stale(staleness_of(oldest_sync_index, trains), policy):
        return None
    return (
        f"batch {batch_seq} trains version {trains}, oldest token is of {oldest_sync_index}, "
        f"limit {policy.max_staleness}"
    )


def step_ineligibilities(step: CandidateStep, policy: AdmissionPolicy) -> Iterator[Ineligibility]:
    """Yield why a step is not trained. A step without a score passes the quality limit."""
    if not step.trainable:
        yield Ineligibility("untrainable", step.reason)
    tagged = [tag for tag in policy.untrained_tags if tag in step.tags]
    if tagged:
        yield Ineligibility("tagged", f"tagged {min(tagged)}")
    if (
        policy.min_step_quality is not None
        and step.quality is not None
        and step.quality < policy.min_step_quality
    ):
        yield Ineligibility(
            "quality", f"quality {step.quality:g} below {policy.min_step_quality:g}"
        )


def trained_part(candidate: Candidate, policy: AdmissionPolicy) -> Candidate:
    """Return the candidate with the steps that the policy excludes marked untrainable.

    Excluded steps do not count for staleness. An untrained tag on the trajectory excludes all
    steps.
    """
    tagged = [tag for tag in policy.untrained_tags if tag in candidate.tags]
    if tagged and candidate.trainable:
        return replace(
            candidate, trainable=False, reason=f"tagged {min(tagged)}", trainable_tokens=0
        )
    if policy.min_step_quality is None and not any(s.tags for s in candidate.steps):
        return candidate
    left_out = {
        s.step_id: lack
        for s in candidate.steps
        if s.trainable and (lack := next(step_ineligibilities(s, policy), None))
    }
    if not left_out:
        return candidate
    steps = tuple(
        replace(s, trainable=False, reason=left_out[s.step_id].detail)
        if s.step_id in left_out
        else s
        for s in candidate.steps
    )
    trained = [s for s in steps if s.trainable]
    tokens = sum(s.response_tokens for s in trained)
    if not trained:
        reason = candidate.reason or "no trainable step"
        return replace(
            candidate, steps=steps, trainable_tokens=tokens, trainable=False, reason=reason
        )
    known = [s.oldest_sync_index for s in trained if s.oldest_sync_index is not None]
    # Candidates of an older release name no sync index for single steps: then that of all steps
    # counts.
    oldest = min(known) if len(known) == len(trained) else candidate.oldest_sync_index
    return replace(candidate, steps=steps, trainable_tokens=tokens, oldest_sync_index=oldest)


def ineligibilities(
    candidate: Candidate, policy: AdmissionPolicy, has_payload: bool
) -> Iterator[Ineligibility]:
    """Yield why a trajectory can never be trained, in order of precedence."""
    if candidate.outcome not in policy.train_outcomes:
        yield Ineligibility("outcome", candidate.outcome)
    if (
        not candidate.trainable
        or not has_payload
        or (candidate.channel == "train" and candidate.oldest_sync_index is None)
    ):
        yield Ineligibility(
            "untrainable",
            candidate.reason or ("no version of this run" if has_payload else "no payload"),
        )
    if candidate.trainable_tokens < policy.min_trainable_tokens:
        yield Ineligibility(
            "too_short",
            f"{candidate.trainable_tokens} trainable tokens, {policy.min_trainable_tokens} needed",
        )
    limit = policy.max_trajectory_tokens
    if (
        limit is not None
        and (size := candidate.prompt_tokens + sum(s.response_tokens for s in candidate.steps))
        > limit
    ):
        yield Ineligibility("too_long", f"{size} tokens, {limit} at most")
    least = policy.min_quality
    if least is not None and candidate.quality is not None and candidate.quality < least:
        yield Ineligibility("quality", f"quality {candidate.quality:g} below {least:g}")
    if policy.required_rewards and (none := valueless(policy.required_rewards, candidate.rewards)):
        yield Ineligibility("reward_missing", f"no value of {', '.join(none)}")
    total = weighted_sum(policy.reward_weights, candidate.rewards)
    if total is not None and (why := out_of_bounds(total)) is not None:
        yield Ineligibility("reward_missing", f"the training reward {why}")


def missing_input(candidate: Candidate, policy: AdmissionPolicy) -> Ineligibility | None:
    """Return an input that may still arrive until the reward deadline, or None."""
    if policy.required_rewards and (none := missing(policy.required_rewards, candidate.rewards)):
        return Ineligibility("reward_missing", f"no {', '.join(none)} yet")
    if policy.require_assessment and candidate.assessment_revision is None:
        return Ineligibility("assessment_missing", "not assessed yet")
    return None


def readiness(
    candidate: Candidate, policy: AdmissionPolicy, has_payload: bool, newest: int | None
) -> Readiness:
    """Return the readiness of a trajectory, without the conditions of its group and batch.

    Args:
        candidate: The trajectory.
        policy: The policy that decides.
        has_payload: Whether the candidate names the place of its payload.
        newest: Sync index of the newest version; None: there is none.
    """
    trained = trained_part(candidate, policy)
    unmet = [lack.reason for lack in ineligibilities(trained, policy, has_payload)]
    awaited = missing_input(trained, policy)
    if awaited is not None:
        unmet.append(awaited.reason)
    staleness = staleness_of(trained.oldest_sync_index, newest)
    if candidate.channel == "train" and is_stale(staleness, policy):
        unmet.append("stale")
    return Readiness(
        tuple(dict.fromkeys(unmet)),
        awaited is not None and len(unmet) == 1,
        staleness,
        trained.trainable_tokens,
        training_reward(policy.reward_weights, trained.rewards),
    )


def unmet_step_conditions(
    step: CandidateStep, channel: Channel, policy: AdmissionPolicy, newest: int | None
) -> list[str]:
    """Return the unmet conditions of a step. Arguments as in `readiness`."""
    unmet = [lack.reason for lack in step_ineligibilities(step, policy)]
    if channel == "train" and is_stale(staleness_of(step.oldest_sync_index, newest), policy):
        unmet.append("stale")
    return unmet
