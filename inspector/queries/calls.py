"""The list of calls that are in no trajectory: failed ones, and steps that came too late."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from clawstream.inspector.errors import InvalidAddress
from clawstream.inspector.queries.lake import Lake, Row

PAGE = 100
FILTERS = ("run_id", "trajectory", "reason")
"""Of the list; each is equal to a value."""


class Place(NamedTuple):
    """The last row of the page before, as it is in an address."""

    before_at: str
    before_id: str


def parse(query: Mapping[str, str]) -> tuple[dict[str, str], Place | None]:
    """Return the filters of an address, and the row after which its page begins.

    Raises:
        InvalidAddress: a parameter is not known, or cannot be read.
    """
    given = {name: text.strip() for name, text in query.items() if text.strip()}
    at, event_id = given.pop("before_at", None), given.pop("before_id", "")
    unknown = given.keys() - set(FILTERS)
    if unknown:
        raise InvalidAddress(
            f"there is no filter {min(unknown)[:40]!r}; there are {', '.join(FILTERS)}"
        )
    try:
        place = None if at is None else Place(datetime.fromisoformat(at).isoformat(), event_id)
    except ValueError:
        raise InvalidAddress(f"before_at: {at!r} is not a time") from None
    return given, place


def calls_of(lake: Lake, given: Mapping[str, str], before: Place | None) -> list[Row]:
    """Return a page of the calls, newest first, and one more if there is another page."""
    conditions = [f"{name} = ${name}" for name in given]
    if before is not None:
        conditions.append("(received_at, id) < ($before_at::TIMESTAMP, $before_id)")
    return lake.rows(
        f"""SELECT * FROM (
            SELECT event_id AS id, run_id, trajectory_key AS trajectory, received_at, reason,
                status::VARCHAR AS status, model, user_agent, message FROM errors
            UNION ALL BY NAME
            SELECT o.step_id || o.mark AS id, o.run_id, o.trajectory_id AS trajectory,
                c.received_at, o.mark AS reason, c.status, c.model, c.user_agent,
                coalesce(o.evidence, '') AS message
            FROM outside o JOIN calls c USING (run_id, step_id)
        ) WHERE {" AND ".join(conditions) or "true"}
        ORDER BY received_at DESC, id DESC LIMIT {PAGE + 1}""",
        {**given, **(before._asdict() if before is not None else {})},
    )


def reasons(lake: Lake) -> list[str]:
    """Return the reasons that the filter offers."""
    found = lake.rows("SELECT reason FROM errors UNION SELECT mark FROM outside ORDER BY 1")
    return [row["reason"] for row in found]
