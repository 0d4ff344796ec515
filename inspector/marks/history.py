"""The marks of trajectories and steps: who made them, and which of them hold.

The rows come from the lake and, until it has them, from the memory of `MarkWriter`. A curation that
is taken back is removed by a curation with `takes_back`. Of a human reward the highest revision
counts, so it is taken back by a newer revision with the value before it; `detail_json` names the
event that it takes back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from clawstream.inspector.errors import InvalidMark
from clawstream.inspector.marks.mark import FUNCTION_VERSION, Event
from clawstream.inspector.marks.writer import KEPT, MarkWriter
from clawstream.inspector.queries.lake import Lake, Row
from clawstream.schemas.ids import key_of_trajectory, new_event_id
from clawstream.schemas.records import Curation, Reward

ACTIONS = 100
"""Newest actions on the page of marks."""
_TARGET = ("run_id", "trajectory_key", "trajectory_id", "step_id")
_VALUES = ("quality", "trainable", "tags", "note")
_COLUMNS = {
    **dict.fromkeys(("event_id", *_TARGET), "VARCHAR"),
    "quality": "DOUBLE", "trainable": "BOOLEAN", "tags": ["VARCHAR"], "note": "VARCHAR",
    "reward_name": "VARCHAR", "reward": "DOUBLE", "takes_back": "VARCHAR", "by": "VARCHAR",
    "made_at": "BIGINT",
}  # fmt: skip
"""Columns of `curations` and `human_rewards`, in order, as DuckDB's `from_json` describes them."""


class Held(NamedTuple):
    """What people say of a target. values: of the fields with a value, by name.

    rewards: human rewards by name.
    """

    values: dict[str, Any]
    rewards: dict[str, float]


class Action(NamedTuple):
    """What a person did at once.

    made_at: microseconds since the epoch. targets: number of trajectories and steps. standing:
    number of its events that were not taken back. first: a row of one of them. undone_by: who took
    them back.
    """

    by: str
    made_at: int
    targets: int
    events: int
    standing: int
    first: Row
    undone_by: str | None


def row_of(event: Event) -> Row:
    """Return an event as a row of the lake."""
    row: Row = {name: getattr(event, name) for name in ("event_id", *_TARGET, "by")}
    row |= dict.fromkeys((*_VALUES, "reward_name", "reward", "takes_back"))
    row["made_at"] = event.created_at
    if isinstance(event, Curation):
        return row | {name: getattr(event, name) for name in (*_VALUES, "takes_back")}
    detail = json.loads(event.detail_json or b"{}")
    row |= {"reward_name": event.name, "reward": event.value, "note": event.reason}
    return row | {"takes_back": detail.get("takes_back")}


def _rows(
    lake: Lake, written: Iterable[Event], condition: str, parameters: Mapping[str, Any]
) -> list[Row]:
    """Return rows of the lake and written ones, each event once, in order of time."""
    return lake.rows(
        f"{_events(condition)} ORDER BY made_at",
        {"written": _as_json(written), **parameters},
    )


def _events(condition: str) -> str:
    """Return SQL for the events of the lake and of `$written`, each once."""
    return f"""
        SELECT * FROM (
            SELECT * FROM curations UNION ALL SELECT * FROM human_rewards UNION ALL
            SELECT unnest(from_json($written, '{json.dumps([_COLUMNS])}'), recursive := true)
        ) WHERE {condition} QUALIFY row_number() OVER (PARTITION BY event_id) = 1"""


def _written(
    lake: Lake, writer: MarkWriter, run_id: str | None = None, keys: Iterable[str] = ()
) -> list[Event]:
    """Return the written events that the lake does not have yet; the others are forgotten."""
    events = writer.written(run_id, keys)
    if not events:
        return events
    found = lake.rows(
        """SELECT event_id FROM curations WHERE event_id IN $ids
        UNION ALL SELECT event_id FROM human_rewards WHERE event_id IN $ids""",
        {"ids": [event.event_id for event in events]},
    )
    known = {row["event_id"] for row in found}
    writer.forget(known)
    return [event for event in events if event.event_id not in known]


def _as_json(written: Iterable[Event]) -> str:
    return json.dumps([row_of(event) for event in written])


def of_keys(lake: Lake, writer: MarkWriter, run_id: str, keys: Sequence[str]) -> list[Row]:
    """Return all events of people about the trajectories with these keys, in order of time.

    Each row that is a mark has `taken_back`, the row that takes it back or None, and `at`.
    """
    rows = _rows(
        lake, _written(lake, writer, run_id, keys), "run_id = $run AND trajectory_key IN $keys",
        {"run": run_id, "keys": list(keys)},
    )  # fmt: skip
    return _with_undo(rows)


def _with_undo(rows: list[Row]) -> list[Row]:
    undone = {row["takes_back"]: row for row in rows if row["takes_back"] is not None}
    for row in rows:
        row["taken_back"] = undone.get(row["event_id"])
        row["at"] = _time(row["made_at"])
    return rows


def _time(made_at: int) -> datetime:
    return datetime.fromtimestamp(made_at / 1e6, UTC).replace(tzinfo=None)


def of_trajectory(lake: Lake, writer: MarkWriter, run_id: str, trajectory_id: str) -> list[Row]:
    """Return the events about one trajectory and its steps; arguments as in `of_keys`."""
    key = key_of_trajectory(trajectory_id)
    mine = (None, trajectory_id, key)
    return [row for row in of_keys(lake, writer, run_id, [key]) if row["trajectory_id"] in mine]


def standing(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the marks that were not taken back."""
    return (row for row in rows if row["takes_back"] is None and row["taken_back"] is None)


def said(rows: Iterable[Row]) -> Held:
    """Return what rows about one target say together: of each field the last value."""
    found = Held({}, {})
    for row in rows:
        found.values.update({n: row[n] for n in _VALUES if row[n] is not None})
        if row["reward"] is not None:
            found.rewards[row["reward_name"]] = row["reward"]
    return found


def held(rows: Iterable[Row]) -> dict[str | None, Held]:
    """Return what holds, by step id (None: the trajectory)."""
    found: dict[str | None, list[Row]] = {}
    for row in standing(rows):
        found.setdefault(row["step_id"], []).append(row)
    return {step_id: said(of) for step_id, of in found.items()}


def held_in_list(lake: Lake, writer: MarkWriter, page: Sequence[Row]) -> dict[Any, Held]:
    """Return what holds of the trajectories of a page that this process has marked.

    Other marks are in the columns of the lake.

    Returns:
        (run id, trajectory id) to what holds.
    """
    marked: dict[str, set[str]] = {}
    for event in _written(lake, writer):
        marked.setdefault(event.run_id, set()).add(event.trajectory_key)
    found = {}
    for run_id, keys in marked.items():
        mine = [r for r in page if r["run_id"] == run_id and r["trajectory_key"] in keys]
        rows = of_keys(lake, writer, run_id, [r["trajectory_key"] for r in mine]) if mine else []
        for r in mine:
            own = [
                m for m in rows
                if m["trajectory_key"] == r["trajectory_key"]
                and m["trajectory_id"] in (None, r["trajectory_id"])
            ]  # fmt: skip
            whole = held(own).get(None)
            if whole is not None:
                found[run_id, r["trajectory_id"]] = whole
    return found


def actions(lake: Lake, writer: MarkWriter) -> list[Action]:
    """Return the newest actions of people, newest first."""
    values = ", ".join(f"'{n}': any_value(m.{n})" for n in (*_TARGET, *_VALUES))
    found = lake.rows(
        f"""WITH marks AS ({_events("true")}), undone AS (
            SELECT takes_back AS event_id, any_value("by") AS undone_by FROM marks
            WHERE takes_back IS NOT NULL GROUP BY takes_back
        )
        SELECT m."by", m.made_at,
            count(DISTINCT ({", ".join(f"m.{n}" for n in _TARGET)})) AS targets,
            count(*) AS events, count(*) - count(u.event_id) AS standing,
            {{{values}, 'reward_name': any_value(m.reward_name), 'reward': any_value(m.reward)}}
                AS first, any_value(u.undone_by) AS undone_by
        FROM marks m LEFT JOIN undone u USING (event_id)
        WHERE m.takes_back IS NULL GROUP BY m."by", m.made_at
        ORDER BY m.made_at DESC LIMIT {ACTIONS}""",
        {"written": _as_json(_written(lake, writer))},
    )
    for row in found:
        row["first"]["at"] = _time(row["made_at"])
    return [Action(**row) for row in found]


def undo(lake: Lake, writer: MarkWriter, by: str, at: int, given: Mapping[str, Any]) -> list[Event]:
    """Return the events that take marks back.

    Args:
        by: Who takes them back.
        at: Time, microseconds since the epoch.
        given: `event_id` of a mark, or `by` and `made_at` of an action.

    Raises:
        InvalidMark: The action has too many events.
    """
    condition = " AND ".join(f'"{name}" IS NOT DISTINCT FROM ${name}' for name in given)
    found = _rows(lake, _written(lake, writer), condition, given)
    if len(found) > KEPT:
        raise InvalidMark(f"{len(found)} events: at most {KEPT} are taken back at once")
    wanted = {row["event_id"]: row for row in found}
    keys: dict[str, set[str]] = {}
    for row in wanted.values():
        keys.setdefault(row["run_id"], set()).add(row["trajectory_key"])
    out: list[Event] = []
    for run_id, of_run in keys.items():
        rows = of_keys(lake, writer, run_id, sorted(of_run))
        left = [row for row in standing(rows) if row["event_id"] not in wanted]
        before = {_slot(row): row["reward"] for row in left}
        mine = (row for row in standing(rows) if row["event_id"] in wanted)
        out += [_undone(row, before.get(_slot(row)), by, at) for row in mine]
    return out


def _slot(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in (*_TARGET, "reward_name"))


def _undone(row: Row, before: float | None, by: str, at: int) -> Event:
    """Return the event that takes a mark back. before: the reward that then counts."""
    place = {name: row[name] for name in _TARGET}
    if row["reward_name"] is None:
        return Curation(
            event_id=new_event_id(), takes_back=row["event_id"], by=by, created_at=at, **place
        )
    return Reward(
        event_id=new_event_id(), source="human", name=row["reward_name"],
        function_version=FUNCTION_VERSION, value=before,
        reason=None if before is not None else f"taken back by {by}", reward_revision=at, by=by,
        detail_json=json.dumps({"takes_back": row["event_id"]}).encode(), created_at=at, **place,
    )  # fmt: skip
