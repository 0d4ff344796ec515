"""Admission policies: from the settings, compared, and judged. Pure."""

from __future__ import annotations

import dataclasses

from schemas.events import AdmissionPolicy
from schemas.settings import Settings

SETTINGS = "settings"
"""`published_by` of what an admission process publishes at its start."""


def policy_of(settings: Settings, version: int, created_at: int, published_by: str = SETTINGS) -> AdmissionPolicy:
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
        min_step_quality=p.min_step_quality,
        require_assessment=p.require_assessment,
        published_by=published_by,
        created_at=created_at,
    )


def same_content(a: AdmissionPolicy, b: AdmissionPolicy) -> bool:
    """Whether they demand the same, whoever published them and when."""
    told = {"policy_version": b.policy_version, "created_at": b.created_at, "published_by": b.published_by}
    return dataclasses.replace(a, **told) == b  # type: ignore[arg-type]


def is_of_settings(policy: AdmissionPolicy) -> bool:
    """Whether an admission process published it, and not a person."""
    return policy.published_by in (None, SETTINGS)


def flaw_of_policy(policy: AdmissionPolicy, before: AdmissionPolicy | None) -> str | None:
    """Why a policy can't be obeyed, given the one in force; None: it can, or it is the same once more."""
    name = f"policy {policy.policy_version}"
    for field in ("group_size", "min_members", "batch_groups", "sync_every", "val_groups"):
        if getattr(policy, field) < 1:
            return f"{name}: {field} is {getattr(policy, field)}, must be at least 1"
    for field in ("min_quality", "min_step_quality"):
        if (least := getattr(policy, field)) is not None and not 0 <= least <= 1:
            return f"{name}: {field} is {least}, must be in [0, 1]"
    if before is None or (policy.policy_version == before.policy_version and same_content(policy, before)):
        return None
    if policy.sync_every != before.sync_every:
        return f"{name}: sync_every is {before.sync_every} for the whole run, not {policy.sync_every}"
    if policy.policy_version <= before.policy_version:
        return f"{name}: policy {before.policy_version} is in force, versions must rise"
    return None
