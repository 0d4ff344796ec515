"""The list of trajectories, one page at a time: newest first, or in the order of a column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from clawstream.inspector.errors import InvalidAddress
from clawstream.inspector.queries.filters import Filters, Selection, selection_of
from clawstream.inspector.queries.lake import Lake, Row
from clawstream.schemas.ids import key_of_trajectory

PAGE = 50
ROWS_MAX = 500
"""Rows that an address can ask for at once, so that a return to the list finds its rows."""


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

    total: rows on all pages. newest: the latest time of closing among them. next: parameters of the
    next page; None: the end. indexed: share of the calls whose texts could be searched.
    """

    rows: list[Row]
    total: int
    newest: datetime | None
    next: dict[str, Any] | None
    indexed: float


_ROWS = """
    WITH selected AS MATERIALIZED (
        SELECT rowid AS place, {key} AS sort_key, closed_at, trajectory_id
        FROM closed c WHERE {condition}
    ), page AS (
        SELECT * EXCLUDE (rewards), {key} AS sort_key
        FROM closed WHERE rowid IN (
            SELECT place FROM selected WHERE {after}
            ORDER BY sort_key DESC, closed_at DESC, trajectory_id DESC LIMIT {limit})
    ), agents AS (
        SELECT run_id, trajectory_key, any_value(user_agent) AS agent, any_value(model) AS model
        FROM calls SEMI JOIN page USING (run_id, trajectory_key) GROUP BY ALL
    ), decided AS (
        SELECT run_id, trajectory_id, max(reason) AS refused_reason
        FROM members SEMI JOIN page USING (run_id, trajectory_id) GROUP BY ALL
    )
    SELECT page.*, agent, model, refused_reason, total, newest
    FROM (SELECT count(*) AS total, max(closed_at) AS newest FROM selected)
        LEFT JOIN page ON true
        LEFT JOIN agents USING (run_id, trajectory_key)
        LEFT JOIN decided USING (run_id, trajectory_id)
    ORDER BY sort_key DESC, closed_at DESC, trajectory_id DESC"""


def parse_sort(query: Mapping[str, str]) -> str | None:
    """Return the order in an address; None: newest first. Raises InvalidAddress."""
    given = query.get("sort", "")
    if given and given.removeprefix("-") not in SORTS:
        raise InvalidAddress(f"sort: {given[:40]!r} is none of {', '.join(SORTS)}")
    return given or None


def parse_place(query: Mapping[str, str]) -> Place | None:
    """Return the row after which a page begins; None: at the first one. Raises InvalidAddress."""
    if "before_at" not in query:
        return None
    try:
        at = datetime.fromisoformat(query["before_at"])
        key = float(query.get("before_key", "0"))
    except ValueError:
        raise InvalidAddress("before_at and before_key are those of a row of the list") from None
    return Place(key, at.replace(tzinfo=None).isoformat(), query.get("before_id", ""))


def parse_rows(query: Mapping[str, str]) -> int:
    """Return how many rows an address shows. Raises InvalidAddress."""
    text = query.get("rows", str(PAGE))
    if not text.isdecimal() or not 0 < int(text) <= ROWS_MAX:
        raise InvalidAddress(f"rows: {text[:40]!r} is not a number from 1 to {ROWS_MAX}")
    return int(text)


def _key(sort: str | None) -> str:
    """Return SQL whose largest value is first; rows without a value are last."""
    if sort is None:
        return "0.0::DOUBLE"
    column = SORTS[sort.removeprefix("-")]
    return f"coalesce({'' if sort.startswith('-') else '-'}{column}, '-Infinity')::DOUBLE"


def page_of(
    lake: Lake,
    filters: Filters,
    before: Place | None = None,
    sort: str | None = None,
    rows: int = PAGE,
) -> Page:
    """Return a page of the trajectories that the filters select.

    Args:
        before: the last row of the page before.
        sort: a name of `SORTS`, with `-` for the largest first; None: newest first.
        rows: on the page, at most.
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
    query = _ROWS.format(condition=selection.condition, after=after, limit=rows + 1, key=_key(sort))
    found = lake.rows(query, {**selection.parameters, **place}, selection.tables)
    total, newest = found[0]["total"], found[0]["newest"]
    found = [row for row in found if row["trajectory_id"] is not None]  # no row: only the total
    last = found[rows - 1] if len(found) > rows else None
    following = last and {
        **filters.given, "sort": sort, "before_key": last["sort_key"],
        "before_at": last["closed_at"].isoformat(), "before_id": last["trajectory_id"],
    }  # fmt: skip
    return Page(found[:rows], total, newest, following, selection.indexed)


def closed_ids(lake: Lake, selection: Selection, limit: int) -> list[Row]:
    """Return `run_id` and `trajectory_id` of at most `limit` closed trajectories.

    Each has the number of its `rows` in the list, and the latest `closed_at` of them.
    """
    return lake.rows(
        f"""SELECT run_id, trajectory_id, count(*) AS rows, max(closed_at) AS closed_at
        FROM closed c WHERE {selection.condition} GROUP BY run_id, trajectory_id LIMIT {limit}""",
        selection.parameters,
        selection.tables,
    )


def is_known(lake: Lake, run_id: str, trajectory_id: str, step_id: str | None) -> bool:
    """Return whether the lake has a trajectory, open or closed, or a step of it."""
    found = lake.rows(
        """SELECT 1 FROM calls WHERE run_id = $run AND trajectory_key = $key
            AND step_id = coalesce($step, step_id)
        UNION ALL SELECT 1 FROM closed
            WHERE run_id = $run AND trajectory_id = $id AND $step IS NULL LIMIT 1""",
        {
            "run": run_id, "id": trajectory_id, "key": key_of_trajectory(trajectory_id),
            "step": step_id,
        },
    )  # fmt: skip
    return bool(found)


def channels_of(lake: Lake) -> dict[str, list[str]]:
    """Return the values that the filters of run and channel offer."""
    return {
        name: [r[name] for r in lake.rows(f"SELECT DISTINCT {name} FROM closed ORDER BY 1")]
        for name in ("run_id", "channel")
    }


def open_rows(lake: Lake, limit: int) -> list[Row]:
    """Return the newest trajectories, closed or not.

    The rows are those of `clawstream.inspector.live.recent.Recent`.
    """
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


def rewards_of(lake: Lake, ids: Sequence[tuple[str, str]]) -> dict[tuple[str, str], float | None]:
    """Return the training rewards that the lake has, by run and trajectory id."""
    if not ids:
        return {}
    found = lake.rows(
        """SELECT run_id, trajectory_id, reward FROM closed
        WHERE run_id IN $runs AND trajectory_id IN $ids""",
        {"runs": [run for run, _ in ids], "ids": [name for _, name in ids]},
    )
    return {(row["run_id"], row["trajectory_id"]): row["reward"] for row in found}


def weights_of(lake: Lake) -> dict[tuple[str, str | None], dict[str, float]]:
    """Return the weights of rewards of the policies in force, by run and channel."""
    found = lake.rows("SELECT run_id, channel, weights FROM policies")
    return {(row["run_id"], row["channel"]): row["weights"] or {} for row in found}
