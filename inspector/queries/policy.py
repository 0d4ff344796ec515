"""Admission policies: the interface that reads and sets them, and what another one would admit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from clawstream.inspector.queries.lake import Lake, Row
from clawstream.schemas.algorithms import smallest_group

EXAMPLES = 10
"""Trajectories that are named for each change."""


class PolicyVersion(NamedTuple):
    """A policy on the log.

    settings: field of `admit.policy` to value. by: who set it. rejection: why admission ignores it;
    None: it does not. json: the policy as the lake has it.
    """

    version: int
    settings: Mapping[str, Any]
    by: str
    at: datetime
    rejection: str | None
    json: str


class PolicyLog(NamedTuple):
    """The policies of a run.

    versions: oldest first. newest: the valid one at the end. behind: channel to the number of
    records that admission must read before it holds (None: none has run); empty without a broker.
    has_ended: the run takes no more trajectories.
    """

    versions: Sequence[PolicyVersion]
    newest: PolicyVersion
    behind: Mapping[str, int | None]
    has_ended: bool


class Policies(Protocol):
    """Reads and sets the policies of runs. Methods raise ForeseenError, which names the field."""

    def of(self, run_id: str) -> PolicyLog | None:
        """Return the policies of a run: of the log, or without a broker those of the lake."""

    def changed(self, run_id: str, changes: Mapping[str, str]) -> PolicyVersion:
        """Return the newest policy with changes, as it would be published.

        Args:
            run_id: Its run.
            changes: Field of `admit.policy` to YAML text.
        """

    def publish(self, run_id: str, changes: Mapping[str, str], by: str, on_version: int) -> int:
        """Publish the newest policy with changes and return its version.

        Args:
            run_id: Its run.
            changes: As in `changed`.
            by: The author.
            on_version: The version that the author has seen: another newest one is an error.
        """


class Change(NamedTuple):
    """Trajectories with the same two verdicts. before, after: reasons of refusal; None: admitted.

    examples: ids of the newest ones.
    """

    before: str | None
    after: str | None
    trajectories: int
    examples: list[str]


def preview(lake: Lake, run_id: str, before: PolicyVersion, after: PolicyVersion) -> list[Change]:
    """Compare what two policies admit of the closed trajectories of channel `train`.

    Each group is decided with the members that it has now. A trajectory that was decided keeps its
    staleness of then; another one is compared with the newest weights. There is nothing to compare
    before admission has applied a policy.

    Args:
        lake: With the macro `readiness_under`.
        run_id: The run.
        before: The policy in force.
        after: The policy to compare.
    """
    found = lake.rows(
        f"""WITH decided AS (
            SELECT run_id, trajectory_id, max_by(round, kafka_timestamp) AS round,
                max_by(staleness, kafka_timestamp) AS staleness
            FROM members WHERE run_id = $run GROUP BY ALL
        ), {_verdicts("before")}, {_verdicts("after")}
        SELECT b.reason AS before, a.reason AS after, count(*) AS trajectories,
            list(a.trajectory_id ORDER BY a.closed_at DESC)[:{EXAMPLES}] AS examples
        FROM before b JOIN after a USING (run_id, trajectory_id)
        GROUP BY b.reason, a.reason
        ORDER BY (b.reason IS NULL) = (a.reason IS NULL), count(*) DESC""",
        {"run": run_id} | _parameters("before", before) | _parameters("after", after),
        is_long=True,
    )
    return [Change(**row) for row in found]


def _parameters(name: str, policy: PolicyVersion) -> dict[str, Any]:
    fields = policy.settings
    return {
        f"{name}_json": policy.json,
        f"{name}_group_size": fields["group_size"],
        f"{name}_min_members": fields["min_members"],
        f"{name}_smallest": smallest_group(fields["algorithm"]),
        f"{name}_max_staleness": fields["max_staleness"],
        f"{name}_zero_variance": fields["drop_zero_variance"],
    }


def _verdicts(name: str) -> str:
    """Return SQL that decides each group as `stream_jobs/admit/group.py` does: parameters `name`_*.

    Staleness is not that of `readiness`, which compares trained trajectories with today's weights.
    """
    return f"""
        {name}_members AS (
            SELECT r.run_id, r.trajectory_id, r.group_id, r.training_reward, c.closed_at,
                coalesce(c.round, d.round) AS round,
                coalesce(c.group_size, ${name}_group_size) AS n,
                CASE WHEN coalesce(d.staleness, r.staleness) > ${name}_max_staleness
                    THEN 'stale' END AS stale,
                [x FOR x IN r.unmet_conditions IF x <> 'stale'] AS unmet
            FROM readiness_under(${name}_json) r JOIN closed c USING (run_id, trajectory_id)
                LEFT JOIN decided d USING (run_id, trajectory_id)
            WHERE r.run_id = $run AND r.channel = 'train'
        ), {name}_groups AS (
            SELECT group_id, round,
                count(*) FILTER (len(unmet) = 0) < greatest(
                    least(any_value(n), ${name}_min_members), ${name}_smallest) AS incomplete,
                ${name}_zero_variance AND any_value(n) > 1 AND count(DISTINCT training_reward)
                    FILTER (len(unmet) = 0) <= 1 AS equal_rewards,
                any_value(stale) FILTER (len(unmet) = 0) AS stale
            FROM {name}_members GROUP BY ALL
        ), {name} AS (
            SELECT m.run_id, m.trajectory_id, m.closed_at, coalesce(
                m.unmet[1], CASE WHEN g.incomplete THEN 'incomplete' END,
                CASE WHEN g.equal_rewards THEN 'zero_variance' END, g.stale) AS reason
            FROM {name}_members m JOIN {name}_groups g
                ON g.group_id = m.group_id AND g.round IS NOT DISTINCT FROM m.round
        )"""


def changes_of(newest: PolicyVersion, given: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of a form that differ from the newest policy, as YAML text."""
    shown = texts_of(newest)
    return {
        name: given.get(name, "").strip() or "null"
        for name in shown
        if name in given and given[name].strip() != shown[name]
    }


def texts_of(policy: PolicyVersion) -> dict[str, str]:
    """Return each field as YAML text, as a form shows it; "" for null."""
    return {
        name: value if isinstance(value, str) else _yaml(value)
        for name, value in policy.settings.items()
    }


def _yaml(value: Any) -> str:
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def differences(before: PolicyVersion, after: PolicyVersion) -> list[Row]:
    """Return the fields that differ: `name`, `before` and `after`."""
    old, new = texts_of(before), texts_of(after)
    return [
        {"name": name, "before": old.get(name, ""), "after": text}
        for name, text in new.items()
        if old.get(name) != text
    ]
