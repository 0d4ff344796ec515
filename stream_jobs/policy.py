"""Admission policies: from the settings, compared, and judged. Pure."""

from __future__ import annotations

import dataclasses

from schemas.events import AdmissionPolicy, Candidate
from schemas.settings import Settings


def policy_of(settings: Settings, version: int, created_at: int) -> AdmissionPolicy:
    """The policy that the settings describe. created_at: wall clock, microseconds."""
    p = settings.admit.policy
    return AdmissionPolicy(
        run_id=settings.run_id,
        policy_version=version,
        group_size=p.group_size,
        min_members=p.min_members,
        required_rewards=p.required_rewards,
        reward_weights=dict(p.reward_weights),
        reward_deadline_ms=round(p.reward_deadline_s * 1000),
        group_deadline_ms=round(p.group_deadline_s * 1000),
        max_staleness=p.max_staleness,
        drop_zero_variance=p.drop_zero_variance,
        min_trainable_tokens=p.min_trainable_tokens,
        max_trajectory_tokens=p.max_trajectory_tokens,
        train_outcomes=p.train_outcomes,
        batch_groups=p.batch_groups,
        batch_tokens=p.batch_tokens,
        sync_every=p.sync_every,
        val_groups=p.val_groups,
        val_deadline_ms=round(p.val_deadline_s * 1000),
        algorithm=p.algorithm,
        min_quality=p.min_quality,
        untrained_tags=p.untrained_tags,
        created_at=created_at,
    )


def trained_part(candidate: Candidate, policy: AdmissionPolicy) -> Candidate:
    """The candidate as the policy has it trained: steps with an untrained tag are not. Its sync indexes stay those of all its steps."""
    left_out = frozenset(policy.untrained_tags)
    if not any(s.trainable and not left_out.isdisjoint(s.tags) for s in candidate.steps):
        return candidate
    steps = tuple(
        s if left_out.isdisjoint(s.tags) or not s.trainable else dataclasses.replace(
            s, trainable=False, reason=f"tagged {min(left_out.intersection(s.tags))}"
        )
        for s in candidate.steps
    )  # fmt: skip
    left = sum(s.response_tokens for s in steps if s.trainable)
    if any(s.trainable for s in steps):
        return dataclasses.replace(candidate, steps=steps, trainable_tokens=left)
    reason = candidate.reason or "no trainable step"
    return dataclasses.replace(candidate, steps=steps, trainable_tokens=left, trainable=False, reason=reason)


def same_content(a: AdmissionPolicy, b: AdmissionPolicy) -> bool:
    """Whether they demand the same: version and clock aside."""
    return dataclasses.replace(a, policy_version=b.policy_version, created_at=b.created_at) == b


def flaw_of_policy(policy: AdmissionPolicy, before: AdmissionPolicy | None) -> str | None:
    """Why a policy can't be obeyed, given the one in force; None: it can, or it is the same once more."""
    name = f"policy {policy.policy_version}"
    for field in ("group_size", "min_members", "batch_groups", "sync_every", "val_groups"):
        if getattr(policy, field) < 1:
            return f"{name}: {field} is {getattr(policy, field)}, must be at least 1"
    if before is None or (policy.policy_version == before.policy_version and same_content(policy, before)):
        return None
    if policy.sync_every != before.sync_every:
        return f"{name}: sync_every is {before.sync_every} for the whole run, not {policy.sync_every}"
    if policy.policy_version <= before.policy_version:
        return f"{name}: policy {before.policy_version} is in force, versions must rise"
    return None
