"""Decide whether a closed trajectory can be trained under a policy, and why not. Pure.

This is the only definition, for admission and for SQL. `trained_part` selects the trained steps,
`ineligibilities` lists permanent obstacles, `missing_input` an input that may still arrive, and
`compute_readiness` combines them. Admission refuses with the first ineligibility.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from schemas.records import AdmissionPolicy, Candidate, CandidateStep
from schemas.reward_matching import missing, training_reward, valueless


class Ineligibility(NamedTuple):
    """An unmet condition: the reason as a refusal names it, and details with numbers."""

    reason: str
    detail: str | None = None


CONDITIONS = (
    "outcome",
    "untrainable",
    "too_short",
    "too_long",
    "quality",
    "reward_missing",
    "assessment_missing",
    "stale",
)
STEP_CONDITIONS = ("untrainable", "tagged", "quality", "stale")


@dataclass(frozen=True, slots=True)
class StepReadiness:
    """Readiness of a step. score: share of the conditions that are met, in [0, 1]."""

    step_id: str
    ready: bool
    score: float
    lacks: tuple[Ineligibility, ...]


@dataclass(frozen=True, slots=True)
class Readiness:
    """Readiness of a trajectory.

    ready: All conditions are met. awaits: The only unmet condition is an input that may still
    arrive.
    lacks: The unmet conditions. score: Share of the conditions that are met, in [0, 1]. staleness:
    Versions between the newest version and the oldest trainable token; None when unknown. The names
    equal the columns of the SQL view `readiness`.
    """

    ready: bool
    awaits: bool
    score: float
    lacks: tuple[Ineligibility, ...]
    staleness: int | None
    steps: tuple[StepReadiness, ...]


def compute_readiness(
    candidate: Candidate,
    policy: AdmissionPolicy,
    newest_sync_index: int | None,
    has_payload: bool = True,
) -> Readiness:
    """Compute the readiness of a trajectory and of each of its steps.

    Does not check conditions that depend on a group or a batch.

    Args:
        newest_sync_index: Sync index of the version to be trained; None when there is none yet.
        has_payload: Whether the candidate names the place of its payload.
    """
    part, limit = (
        trained_part(candidate, policy),
        policy.max_staleness if candidate.channel == "train" else None,
    )
    lacks = list(ineligibilities(part, policy, has_payload))
    waits = missing_input(part, policy)
    staleness = age(part.oldest_sync_index, newest_sync_index)
    if waits is not None:
        lacks.append(waits)
    if limit is not None and staleness is not None and staleness > limit:
        lacks.append(Ineligibility("stale", f"{staleness} versions, limit {limit}"))
    steps = []
    for step in candidate.steps:
        found = list(step_ineligibilities(step, policy))
        old = age(step.oldest_sync_index, newest_sync_index)
        if limit is not None and old is not None and old > limit:
            found.append(Ineligibility("stale", f"{old} versions, limit {limit}"))
        steps.append(
            StepReadiness(
                step.step_id, not found, 1 - len(found) / len(STEP_CONDITIONS), tuple(found)
            )
        )
    score = 1 - len({lack.reason for lack in lacks}) / len(CONDITIONS)
    return Readiness(
        not lacks,
        waits is not None and len(lacks) == 1,
        score,
        tuple(lacks),
        staleness,
        tuple(steps),
    )


def age(oldest_sync_index: int | None, trains: int | None) -> int | None:
    """Versions between the oldest token and the trained version; None when one is unknown."""
    return None if oldest_sync_index is None or trains is None else trains - oldest_sync_index


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
    reward = training_reward(policy.reward_weights, candidate.rewards)
    if reward is not None and not math.isfinite(reward):
        yield Ineligibility("reward_missing", f"the training reward is {reward}")


def missing_input(candidate: Candidate, policy: AdmissionPolicy) -> Ineligibility | None:
    """Return an input that may still arrive until the reward deadline, or None."""
    if policy.required_rewards and (none := missing(policy.required_rewards, candidate.rewards)):
        return Ineligibility("reward_missing", f"no {', '.join(none)} yet")
    if policy.require_assessment and candidate.assessment_revision is None:
        return Ineligibility("assessment_missing", "not assessed yet")
    return None
