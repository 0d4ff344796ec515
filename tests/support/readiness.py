"""Readiness of trajectories, composed of the rules of admission, to compare with the SQL views."""

from __future__ import annotations

from dataclasses import dataclass

from clawstream.schemas.records import AdmissionPolicy, Candidate
from clawstream.stream_jobs.admit.eligibility import (
    Ineligibility,
    ineligibilities,
    missing_input,
    step_ineligibilities,
    trained_part,
)

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
    unmet_conditions: tuple[Ineligibility, ...]


@dataclass(frozen=True, slots=True)
class Readiness:
    """Readiness of a trajectory, named like the columns of the SQL view `readiness`.

    awaiting_input: the only unmet condition is an input that may still arrive. score: share of the
    conditions that are met. staleness: versions from the oldest trainable token to the newest.
    """

    ready: bool
    awaiting_input: bool
    score: float
    unmet_conditions: tuple[Ineligibility, ...]
    staleness: int | None
    steps: tuple[StepReadiness, ...]


def age(oldest_sync_index: int | None, trains: int | None) -> int | None:
    """Return the versions between the oldest token and the trained version, if both are known."""
    return None if oldest_sync_index is None or trains is None else trains - oldest_sync_index


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
    unmet_conditions = list(ineligibilities(part, policy, has_payload))
    waits = missing_input(part, policy)
    staleness = age(part.oldest_sync_index, newest_sync_index)
    if waits is not None:
        unmet_conditions.append(waits)
    if limit is not None and staleness is not None and staleness > limit:
        unmet_conditions.append(Ineligibility("stale", f"{staleness} versions, limit {limit}"))
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
    score = 1 - len({lack.reason for lack in unmet_conditions}) / len(CONDITIONS)
    return Readiness(
        not unmet_conditions,
        waits is not None and len(unmet_conditions) == 1,
        score,
        tuple(unmet_conditions),
        staleness,
        tuple(steps),
    )
