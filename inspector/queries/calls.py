"""The list of calls that are in no trajectory: failed ones, and steps that came too late."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from inspector.errors import InvalidAddress
from inspector.queries.lake import Lake, Row

PAGE = 100
FILTERS = ("run_id", "trajectory", "reason")
"""Of the list; each is equal to a value."""


def parse(query: Mapping[str, str]) -> tuple[dict[str, str], str | None]:
    """Return the filters of an address, and the time before which its page begins.

    Raises:
        InvalidAddress: a parameter is not known, or cannot be read.
    """
    given = {name: text.strip() for name, text in query.items() if text.strip()}
    before = given.pop("before", None)
    unknown = given.keys() - set(FILTERS)
    if unknown:
        raise InvalidAddress(
            f"there is no filter {min(unknown)[:40]!r}; there are {', '.join(FILTERS)}"
        )
    try:
        return given, None if before is None else datetime.fromisoformat(before).isoformat()
    except ValueError:
        raise InvalidAddress(f"before: {before!r} is not a time") from None


def calls_of(lake: Lake, given: Mapping[str, str], before: str | None) -> list[Row]:
    """Return a page of the calls, newest first, and one more if there is another page."""
    conditions = [f"{name} = ${name}" for name in given]
    if before is not None:
        conditions.append("received_at < $before::TIMESTAMP")
    return lake.rows(
        f"""SELECT * FROM (
            SELECT run_id, trajectory_key AS trajectory, received_at, reason, status::VARCHAR
                AS status, model, user_agent, message FROM errors
            UNION ALL BY NAME
            SELECT o.run_id, o.trajectory_id AS trajectory, c.received_at, o.mark AS reason,
                c.status, c.model, c.user_agent, coalesce(o.evidence, '') AS message
            FROM outside o JOIN calls c USING (run_id, step_id)
        ) WHERE {" AND ".join(conditions) or "true"}
        ORDER BY received_at DESC LIMIT {PAGE + 1}""",
        {**given, **({"before": before} if before is not None else {})},
    )


def reasons(lake: Lake) -> list[str]:
    """Return the reasons that the filter offers."""
    found = lake.rows("SELECT reason FROM errors UNION SELECT mark FROM outside ORDER BY 1")
    return [row["reason"] for row in found]
