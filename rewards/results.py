"""Compute the rewards of a trajectory, or of the members of a group. Pure.

Every function yields a result for every closed trajectory, including failed, timed-out and lost
ones: a reward of the trajectory, rewards of some of its steps, or an explicit no_reward with a
reason. Ids depend only on trajectory, function and version, so repeated evaluation is idempotent.
The revision is the version if it is a whole number: a newer version supersedes an older one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import orjson

from clawstream.rewards.registry import GroupRule, Rule, group_rule_of, rule_of
from clawstream.schemas.ids import stable_id
from clawstream.schemas.numbers.values import number_of
from clawstream.schemas.records import Candidate, Reward, Trajectory
from clawstream.schemas.records.rewards import out_of_bounds
from clawstream.schemas.rule_spec import reason_text
from clawstream.schemas.settings import Settings
from clawstream.schemas.user_function import Find

DETAIL_MAX_BYTES = 4096
"""Of the details of one reward: they are on the record, not in the state of assemble."""

Checked = tuple[float | None, str | None, bytes | None]
"""The value, the reason where there is none, and the details."""


def rules_of(settings: Settings, find: Find) -> dict[str, tuple[Rule, ...]]:
    """Resolve the reward functions of a trajectory by run id or `*`.

    Raises:
        SettingsError: There is no such function; the message names the setting.
    """
    models = settings.reward_models
    return {
        run: tuple(
            rule_of(spec, f"jobs.reward_functions.{run}", find, models)
            for spec in specs
            if not settings.jobs.compares(spec)
        )
        for run, specs in settings.jobs.reward_functions.items()
    }


def group_rules_of(settings: Settings, find: Find) -> dict[str, tuple[GroupRule, ...]]:
    """Resolve the functions that compare the members of a group by run id or `*`.

    Raises:
        SettingsError: One cannot be made; the message names the setting.
    """
    models = settings.reward_models
    return {
        run: tuple(
            group_rule_of(spec, f"jobs.reward_functions.{run}", find, models)
            for spec in specs
            if settings.jobs.compares(spec)
        )
        for run, specs in settings.jobs.reward_functions.items()
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
        checked = {step: _checked_of(step, value, steps) for step, value in values.items()}
    except MemoryError:
        raise  # of this process; a child reports its own as another error
    except Exception as e:  # noqa: BLE001 - a user's function: its error is the recorded reason
        yield _reward(trajectory, rule, created_at, reason=reason_text(e))
        return
    if not checked:
        yield _reward(trajectory, rule, created_at, reason="no step was rewarded")
    for step, (value, reason, detail) in checked.items():
        yield _reward(trajectory, rule, created_at, step, value, reason, detail)


def rewards_of_group(
    members: Sequence[tuple[Candidate, Trajectory | str]], rule: GroupRule, created_at: int
) -> list[Reward]:
    """Return the reward of each member of a group.

    Args:
        members: Each with its complete trajectory, or the reason why it is not compared.
        rule: Compares the members with a trajectory. It is called only if there are two or more.
        created_at: Microseconds, informational.
    """
    shown = [(c.trajectory_id, t) for c, t in members if isinstance(t, Trajectory)]
    results = dict[str, Checked]()
    failed = "no other member of its group has a trajectory"
    if len(shown) > 1:
        try:
            found = rule.function([t for _, t in shown])
            results = {
                name: (None, one, None) if isinstance(one, str) else _checked(one)
                for (name, _), one in zip(shown, found, strict=True)
            }
        except MemoryError:
            raise  # as in `rewards_of`
        except Exception as e:  # noqa: BLE001 - as there
            failed = reason_text(e)
    rewards = []
    for member, trajectory in members:
        reason = trajectory if isinstance(trajectory, str) else failed
        value, why, detail = results.get(member.trajectory_id, (None, reason, None))
        rewards.append(_reward(member, rule, created_at, None, value, why, detail))
    return rewards


def no_reward(trajectory: Trajectory, rule: Rule, created_at: int, reason: str) -> Reward:
    """Return the result of a rule that could not run. created_at: microseconds."""
    return _reward(trajectory, rule, created_at, reason=reason)


def _checked_of(step: str | None, value: object, steps: set[str]) -> Checked:
    """Return a checked result; what is wrong with that of a step costs only its own reward.

    Raises:
        ValueError: There is no such step.
        Exception: What is wrong with the result of a trajectory.
    """
    if step is None:
        return _checked(value)
    if step not in steps:
        raise ValueError(f"no step {step!r} in the trajectory")
    if isinstance(value, str):
        return None, value, None
    try:
        return _checked(value)
    except MemoryError:
        raise
    except Exception as e:  # noqa: BLE001 - of a user's function: the recorded reason
        return None, reason_text(e), None


def _checked(value: object) -> Checked:
    """Return a checked result. Raises what is wrong."""
    detail = None
    if isinstance(value, tuple | list):  # a child process returns plain lists
        value, given = value
        detail = orjson.dumps(given, option=orjson.OPT_NON_STR_KEYS)
        if len(detail) > DETAIL_MAX_BYTES:
            raise ValueError(f"the details have {len(detail)} bytes, above {DETAIL_MAX_BYTES}")
    if value is None:
        return None, "the function returned None", detail
    try:
        number = number_of(value)
    except TypeError as e:
        raise TypeError(f"a reward is a number, not {e}") from e
    if (why := out_of_bounds(number)) is not None:
        return None, why, detail
    return float(number), None, detail


def _reward(
    trajectory: Trajectory | Candidate,
    rule: Rule | GroupRule,
    created_at: int,
    step: str | None = None,
    value: float | None = None,
    reason: str | None = None,
    detail: bytes | None = None,
) -> Reward:
    return Reward(
        event_id=stable_id(
            trajectory.run_id,
            trajectory.trajectory_id,
            rule.source,
            rule.name,
            rule.version,
            *([step] if step else []),
        ),
        run_id=trajectory.run_id,
        trajectory_key=trajectory.trajectory_key,
        trajectory_id=trajectory.trajectory_id,
        step_id=step,
        source=rule.source,
        name=rule.name,
        function_version=rule.version,
        value=value,
        reason=reason_text(reason) if reason else None,
        reward_revision=rule.revision,
        by=rule.by,
        detail_json=detail,
        created_at=created_at,
    )
