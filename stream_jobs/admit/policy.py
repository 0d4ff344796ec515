"""Create admission policies from settings, compare and validate them. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from clawstream.schemas.records import AdmissionPolicy
from clawstream.schemas.records.rewards import out_of_bounds
from clawstream.schemas.settings import PolicySettings, Settings

SETTINGS = "settings"
"""`published_by` of what an admission process publishes at its start."""


def policy_of(
    settings: Settings, version: int, created_at: int, published_by: str = SETTINGS
) -> AdmissionPolicy:
    """Return the policy that the settings describe. created_at: wall clock, microseconds."""
    p = settings.admit.policy
    return AdmissionPolicy(
        run_id=settings.run_id,
        policy_version=version,
        group_size=p.group_size,
        min_members=p.min_members,
        required_rewards=settings.required_rewards,
        reward_weights=dict(p.reward_weights),
        reward_deadline_ms=round(p.reward_deadline_s * 1000),
        group_deadline_ms=round(p.group_deadline_s * 1000),
        max_staleness=settings.max_staleness,
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
        require_assessment=settings.require_assessment,
        published_by=published_by,
        created_at=created_at,
    )


def settings_of(policy: AdmissionPolicy) -> PolicySettings:
    """Return the settings that describe a policy, unvalidated: the inverse of `policy_of`."""
    same = {
        name: getattr(policy, name) for name in PolicySettings.model_fields if hasattr(policy, name)
    }
    seconds = {
        name: getattr(policy, f"{name[:-2]}_ms") / 1000
        for name in PolicySettings.model_fields
        if name not in same
    }
    return PolicySettings.model_construct(**same, **seconds)


class Published(NamedTuple):
    """The policies on the log. newest: The last valid one. of_settings: The last from settings.

    here: Whether `newest` is on the current candidates topic, which may have been recreated.
    """

    newest: AdmissionPolicy | None
    of_settings: AdmissionPolicy | None
    here: bool


def next_policy(published: Published, of_settings: AdmissionPolicy) -> AdmissionPolicy | None:
    """Return the policy that an admission process publishes at its start, or None.

    Settings are published when they differ from the settings published last, whatever a user has
    set since. So a user's policy stays in force until the settings change. On a recreated
    candidates topic the current policy is published again.

    Args:
        of_settings: The policy of the current settings, with the next version.
    """
    newest, before, here = published
    if newest is None or before is None or not same_content(before, of_settings):
        return of_settings
    if here:
        return None
    return dataclasses.replace(
        newest, policy_version=of_settings.policy_version, created_at=of_settings.created_at
    )


def same_content(a: AdmissionPolicy, b: AdmissionPolicy) -> bool:
    """Return whether two policies are equal apart from version, publisher and time."""
    same = dataclasses.replace(
        a,
        policy_version=b.policy_version,
        created_at=b.created_at,
        published_by=b.published_by,
    )
    return same == b


def is_of_settings(policy: AdmissionPolicy) -> bool:
    """Return whether an admission process published the policy, not a user."""
    return policy.published_by in (None, SETTINGS)


def policy_rejection(policy: AdmissionPolicy, before: AdmissionPolicy | None) -> str | None:
    """Return why a policy is invalid after the one in force; None when valid or a repetition."""
    name, invalid = f"policy {policy.policy_version}", _invalid_field(policy)
    if invalid is not None:
        return f"{name}: {invalid}"
    if before is None or (
        policy.policy_version == before.policy_version and same_content(policy, before)
    ):
        return None
    if policy.sync_every != before.sync_every:
        return (
            f"{name}: sync_every is {before.sync_every} for the whole run, not {policy.sync_every}"
        )
    if policy.policy_version <= before.policy_version:
        return f"{name}: policy {before.policy_version} is in force, versions must rise"
    return None


_LEAST: Mapping[str, int] = {
    **dict.fromkeys(("group_size", "min_members", "batch_groups", "sync_every", "val_groups"), 1),
    **dict.fromkeys(("batch_tokens", "max_trajectory_tokens"), 1),
    **dict.fromkeys(("reward_deadline_ms", "group_deadline_ms", "val_deadline_ms"), 0),
    **dict.fromkeys(("max_staleness", "min_trainable_tokens"), 0),
}
"""Lower limits, as in the settings; a deadline of less than half a millisecond is 0 here.

The algorithm is not checked: only the trainer knows the algorithms.
"""


def _invalid_field(policy: AdmissionPolicy) -> str | None:
    for field, least in _LEAST.items():
        if (value := getattr(policy, field)) is not None and value < least:
            return f"{field} is {value}, must be at least {least}"
    for field in ("min_quality", "min_step_quality"):
        if (value := getattr(policy, field)) is not None and not 0 <= value <= 1:
            return f"{field} is {value}, must be in [0, 1]"
    for name, weight in policy.reward_weights.items():
        if (why := out_of_bounds(weight)) is not None:
            return f"reward_weights of {name!r:.250}: {why}"
    return None
