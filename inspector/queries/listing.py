"""The list of trajectories, one page at a time: newest first, or in the order of a column."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from inspector.queries.filters import Filters, Selection, selection_of
from inspector.queries.lake import Lake, Row

PAGE = 50


SORTS = {
    "reward": "reward", "quality": "quality", "steps": "steps", "tokens": "trainable_tokens",
    "version": "newest_sync_index", "closed": "epoch(closed_at)",
}  # fmt: skip
"""Columns that a list can be ordered by, as SQL. With `-` before the name the largest is first."""


class Place(NamedTuple):
    """The last row of a page: its value of the order, time of closing and id."""

    key: float
    closed_at: str
    trajectory_id: str


class Page(NamedTuple):
    """A page.

    total: rows on all pages. next: parameters of the next page; None: the end. indexed: share of
    the calls whose texts could be searched.
    """

    rows: list[Row]
    total: int
    next: dict[str, Any] | None
    indexed: float


_ROWS = """
    WITH selected AS MATERIALIZED (
        SELECT rowid AS place, {key} AS sort_key, closed_at, trajectory_id
        FROM closed c WHERE {condition}
    ), page AS (
        SELECT * EXCLUDE (rewards), {key} AS sort_key FROM closed WHERE rowid IN (
            SELECT place FROM selected WHERE {after}
            ORDER BY sort_key DESC, closed_at DESC, trajectory_id DESC LIMIT {limit})
    ), agents AS (
        SELECT run_id, trajectory_key, any_value(user_agent) AS agent, any_value(model) AS model
        FROM calls SEMI JOIN page USING (run_id, trajectory_key) GROUP BY ALL
    ), decided AS (
        SELECT run_id, trajectory_id, bool_or(admitted) AS admitted, max(batch_seq) AS batch_seq,
            max(reason) AS refused_reason
        FROM members SEMI JOIN page USING (run_id, trajectory_id) GROUP BY ALL
    )
    SELECT page.*, agent, model, admitted, batch_seq, refused_reason, total
    FROM (SELECT count(*) AS total FROM selected) LEFT JOIN page ON true
        LEFT JOIN agents USING (run_id, trajectory_key)
        LEFT JOIN decided USING (run_id, trajectory_id)
    ORDER BY sort_key DESC, closed_at DESC, trajectory_id DESC"""


def parse_sort(query: Mapping[str, str]) -> str | None:
    """Return the order in an address; None: newest first."""
    given = query.get("sort", "")
    return given if given.removeprefix("-") in SORTS else None


def parse_place(query: Mapping[str, str]) -> Place | None:
    """Return the row after which a page begins; None: at the first one."""
    try:
        at = datetime.fromisoformat(query.get("before_at", ""))
        key = float(query.get("before_key", "0"))
    except ValueError:
        return None
    return Place(key, at.replace(tzinfo=None).isoformat(), query.get("before_id", ""))


def _key(sort: str | None) -> str:
    """Return SQL whose largest value is first; rows without a value are last."""
    if sort is None:
        return "0.0::DOUBLE"
    column = SORTS[sort.removeprefix("-")]
    return f"coalesce({'' if sort.startswith('-') else '-'}{column}, '-Infinity')::DOUBLE"


def page_of(
    lake: Lake, filters: Filters, before: Place | None = None, sort: str | None = None
) -> Page:
    """Return a page of the trajectories that the filters select.

    Args:
        before: the last row of the former page.
        sort: a name of `SORTS`, with `-` for the largest first; None: newest first.
    """
    selection = selection_of(lake, filters)
    place: dict[str, Any] = {}
    after = "true"
    if before is not None:
        after = """(sort_key, closed_at, trajectory_id)
            < ($before_key::DOUBLE, $before_at::TIMESTAMP, $before_id)"""
        place = {
            "before_key": before.key, "before_at": before.closed_at,
            "before_id": before.trajectory_id,
        }  # fmt: skip
    query = _ROWS.format(condition=selection.condition, after=after, limit=PAGE + 1, key=_key(sort))
    found = lake.rows(query, {**selection.parameters, **place}, selection.tables)
    total = found[0]["total"]
    found = [row for row in found if row["trajectory_id"] is not None]  # no row: only the total
    rows, last = found[:PAGE], found[PAGE - 1] if len(found) > PAGE else None
    following = last and {
        **filters.given, "sort": sort, "before_key": last["sort_key"],
        "before_at": last["closed_at"].isoformat(), "before_id": last["trajectory_id"],
    }  # fmt: skip
    return Page(rows, total, following, selection.indexed)


def closed_ids(lake: Lake, selection: Selection, limit: int) -> list[tuple[str, str]]:
    """Return (run id, trajectory id) of at most `limit` closed trajectories."""
    found = lake.rows(
        f"""SELECT DISTINCT run_id, trajectory_id FROM closed c
        WHERE {selection.condition} LIMIT {limit}""",
        selection.parameters,
        selection.tables,
    )
    return [(row["run_id"], row["trajectory_id"]) for row in found]


def channels_of(lake: Lake) -> dict[str, list[str]]:
    """Return the values that the filters of run and channel offer."""
    return {
        name: [r[name] for r in lake.rows(f"SELECT DISTINCT {name} FROM closed ORDER BY 1")]
        for name in ("run_id", "channel")
    }


def open_rows(lake: Lake, limit: int) -> list[Row]:
    """Return the newest trajectories, closed or not, as `inspector.live.recent.Recent` has them."""
    return lake.rows(
        """WITH newest AS (
            SELECT run_id, trajectory_key, any_value(group_id) AS group_id, count(*) AS steps,
                any_value(model) AS model, max(kafka_timestamp) AS "at"
            FROM calls GROUP BY run_id, trajectory_key ORDER BY "at" DESC LIMIT $limit)
        SELECT n.*, coalesce(c.trajectory_id, n.trajectory_key) AS trajectory_id, c.outcome,
            c.reward
        FROM newest n LEFT JOIN closed c ON c.run_id = n.run_id
            AND c.trajectory_key = n.trajectory_key
        QUALIFY row_number() OVER (PARTITION BY n.run_id, n.trajectory_key
            ORDER BY c.closed_at DESC) = 1
        ORDER BY "at" DESC""",
        {"limit": limit},
    )
