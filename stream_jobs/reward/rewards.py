"""Compute rule rewards of a trajectory. Pure.

Every function yields a result for every closed trajectory, including failed, timed-out and lost
ones: a reward of the trajectory, rewards of some of its steps, or an explicit no_reward with a
reason. Ids depend only on trajectory, function and version, so repeated evaluation is idempotent.
The revision is the version if it is a whole number: a newer version supersedes an older one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from rewards.registry import Rule, rule_of
from schemas.ids import stable_id
from schemas.records import Reward, Trajectory
from schemas.rule_spec import reason_text
from schemas.user_function import Find

SOURCE = "rule"


def rules_of(configured: Mapping[str, tuple[str, ...]], find: Find) -> dict[str, tuple[Rule, ...]]:
    """Resolve the reward functions by run id or `*`. Raises SettingsError naming the setting."""
    return {
        run: tuple(rule_of(spec, f"jobs.reward_functions.{run}", find) for spec in specs)
        for run, specs in configured.items()
    }


def rewards_of(trajectory: Trajectory, rule: Rule, created_at: int) -> Iterator[Reward]:
    """Yield the rewards of a rule for a complete trajectory. created_at: microseconds."""
    steps = {s.step_id for s in trajectory.steps}
    if trajectory.outcome == "lost":
        lost = f"trajectory lost: {trajectory.reason or 'no payload'}"
        yield _reward(trajectory, rule, created_at, reason=lost)
        return
    try:
        result = rule.function(trajectory)
        values = dict(result) if isinstance(result, Mapping) else {None: result}
        checked = {step: _checked(step, value, steps) for step, value in values.items()}
    except MemoryError:
        raise  # of this process; a child reports its own as another error
    except Exception as e:  # noqa: BLE001 - a user's function: its error is the recorded reason
        yield _reward(trajectory, rule, created_at, reason=reason_text(e))
        return
    if not checked:
        yield _reward(trajectory, rule, created_at, reason="no step was rewarded")
    for step, (value, reason) in checked.items():
        yield _reward(trajectory, rule, created_at, step, value, reason)


def no_reward(trajectory: Trajectory, rule: Rule, created_at: int, reason: str) -> Reward:
    """Return the result of a rule that could not run. created_at: microseconds."""
    return _reward(trajectory, rule, created_at, reason=reason)


def _checked(step: str | None, value: object, steps: set[str]) -> tuple[float | None, str | None]:
    if step is not None and step not in steps:
        raise ValueError(f"no step {step!r} in the trajectory")
    if value is None:
        return None, "the function returned None"
    if not isinstance(value, int | float):
        raise TypeError(f"a reward is a number, not {type(value).__name__}")
    return (float(value), None) if math.isfinite(value) else (None, f"not a finite number: {value}")


def _reward(
    trajectory: Trajectory,
    rule: Rule,
    created_at: int,
    step: str | None = None,
    value: float | None = None,
    reason: str | None = None,
) -> Reward:
    return Reward(
        event_id=stable_id(
            trajectory.run_id,
            trajectory.trajectory_id,
            SOURCE,
            rule.name,
            rule.version,
            *([step] if step else []),
        ),
        run_id=trajectory.run_id,
        trajectory_key=trajectory.trajectory_key,
        trajectory_id=trajectory.trajectory_id,
        step_id=step,
        source="rule",
        name=rule.name,
        function_version=rule.version,
        value=value,
        reason=reason_text(reason) if reason else None,
        reward_revision=rule.revision,
        by="clawstream.reward",
        created_at=created_at,
    )
