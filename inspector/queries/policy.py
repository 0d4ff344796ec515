"""Admission policies: the interface that reads and sets them, and what another one would admit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from clawstream.inspector.queries.lake import Lake, Row

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

    Admission's own rules decide each group, with the members that it has now. A trajectory that was
    decided keeps its staleness of then; another one is compared with the newest weights. There is
    nothing to compare before admission has applied a policy.

    Args:
        lake: With the function `refusals_json`.
        run_id: The run.
        before: The policy in force.
        after: The policy to compare.
    """
    rows = lake.rows(
        f"""WITH decided AS (
            SELECT run_id, trajectory_id, max_by(round, kafka_timestamp) AS round,
                max_by(staleness, kafka_timestamp) AS staleness
            FROM members WHERE run_id = $run GROUP BY ALL
        ), rounds AS (
            SELECT group_id, coalesce(c.round, d.round) AS round, any_value(newest) AS newest,
                to_json(list(member_json(candidate, d.staleness) ORDER BY trajectory_id))
                    AS members,
                list(trajectory_id ORDER BY trajectory_id) AS ids,
                list(closed_at ORDER BY trajectory_id) AS closed_at
            FROM admission_candidates() c LEFT JOIN decided d USING (run_id, trajectory_id)
            WHERE run_id = $run AND channel = 'train' GROUP BY ALL
        ), verdicts AS (
            SELECT unnest(ids) AS trajectory_id, unnest(closed_at) AS closed_at,
                unnest(from_json(refusals_json(members, $before, newest), '["VARCHAR"]')) AS before,
                unnest(from_json(refusals_json(members, $after, newest), '["VARCHAR"]')) AS after
            FROM rounds
        )
        SELECT before, after, count(*) AS trajectories,
            list(trajectory_id ORDER BY closed_at DESC)[:{EXAMPLES}] AS examples
        FROM verdicts GROUP BY before, after
        ORDER BY (before IS NULL) = (after IS NULL), count(*) DESC""",
        {"run": run_id, "before": before.json, "after": after.json},
        is_long=True,
    )
    return [Change(**row) for row in rows]


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
