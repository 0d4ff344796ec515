"""The filters of the list of trajectories: from the address to SQL with bound parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from inspector.errors import SearchTooLong
from inspector.queries.lake import Lake

TEXT_CHARACTERS = 400
"""Of a search: each word of it is a query of the index, and all are one query of the list."""
OUTCOMES = ("completed", "failed", "abandoned", "timed_out", "lost", "replaced")
STAGES = ("admitted", "refused", "undecided")
_EQUAL = ("run_id", "group_id", "channel", "outcome")


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """What the list shows; None: anything.

    agent: part of the user agent or model. task: part of the metadata or group. version: sync
    index among the trainable tokens. text: words of requests and replies. stage: what admission
    said. reason: why it is not rewarded, not trainable or refused, as the funnel names it.
    """

    run_id: str | None = None
    agent: str | None = None
    task: str | None = None
    channel: str | None = None
    group_id: str | None = None
    version: int | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    quality_min: float | None = None
    quality_max: float | None = None
    outcome: str | None = None
    stage: str | None = None
    reason: str | None = None
    text: str | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The filters that are set, by name."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in found.items() if value is not None}


def parse_filters(query: Mapping[str, str]) -> Filters:
    """Read filters from the parameters of an address; ignores empty and unreadable values.

    Raises:
        SearchTooLong: the text has more than `TEXT_CHARACTERS`.
    """
    if len(query.get("text", "")) > TEXT_CHARACTERS:
        raise SearchTooLong(f"a search for texts has at most {TEXT_CHARACTERS} characters")
    given: dict[str, Any] = {}
    read: dict[str, Callable[[str], Any]] = {"int": _int64, "float": float}
    for field in fields(Filters):
        text = query.get(field.name, "").strip()
        kind = str(field.type).partition(" ")[0]
        try:
            value = read.get(kind, str)(text) if text else None
        except ValueError:
            value = None
        if value is not None:
            given[field.name] = value
    return Filters(**given)


def _int64(text: str) -> int:
    """Read an integer of at most 64 bits, as SQL has it. Raises ValueError."""
    value = int(text)
    if not -(2**63) <= value < 2**63:
        raise ValueError
    return value


class Selection(NamedTuple):
    """A condition over `closed c`, with the parameters and tables that it needs.

    indexed: share of the calls whose texts could be searched.
    """

    condition: str
    parameters: Mapping[str, Any]
    tables: Mapping[str, Any]
    indexed: float


def selection_of(lake: Lake, filters: Filters) -> Selection:
    """Return what selects the trajectories of filters."""
    given = filters.given
    found, indexed = lake.find(filters.text) if filters.text is not None else ((), 1.0)
    tables = {f"text_{number}": table for number, table in enumerate(found)}
    conditions = [
        *_conditions(filters),
        *(
            f"(c.run_id, c.trajectory_key) IN (SELECT (run_id, trajectory_key) FROM {name})"
            for name in tables
        ),
    ]
    parameters = {name: v for name, v in given.items() if name not in ("stage", "text")}
    return Selection(" AND ".join(conditions) or "true", parameters, tables, indexed)


def _conditions(filters: Filters) -> Iterator[str]:
    given = filters.given
    yield from (f"c.{name} = ${name}" for name in _EQUAL if name in given)
    for name in ("reward", "quality"):
        if f"{name}_min" in given:
            yield f"c.{name} >= ${name}_min"
        if f"{name}_max" in given:
            yield f"c.{name} <= ${name}_max"
    if "version" in given:
        yield "$version BETWEEN c.oldest_sync_index AND c.newest_sync_index"
    if "agent" in given:
        yield """(c.run_id, c.trajectory_key) IN (SELECT (run_id, trajectory_key) FROM calls
            WHERE contains(lower(user_agent), lower($agent)) OR model = $agent)"""
    if "task" in given:
        yield """(contains(lower(c.group_id), lower($task)) OR (c.run_id, c.trajectory_id) IN
            (SELECT (run_id, trajectory_id) FROM payloads
             WHERE contains(lower(metadata_json), lower($task))))"""
    if filters.stage in STAGES:
        decided = "(SELECT (run_id, trajectory_id) FROM members WHERE admitted)"
        refused = "(SELECT (run_id, trajectory_id) FROM members WHERE NOT admitted)"
        place = "(c.run_id, c.trajectory_id)"
        yield {
            "admitted": f"{place} IN {decided}",
            "refused": f"{place} IN {refused} AND {place} NOT IN {decided}",
            "undecided": f"{place} NOT IN {decided} AND {place} NOT IN {refused}",
        }[filters.stage]
    if "reason" in given:
        yield """(c.reason = $reason OR (c.reward IS NULL AND c.unrewarded_reason = $reason)
            OR (c.run_id, c.trajectory_id) IN (SELECT (run_id, trajectory_id) FROM members
                WHERE NOT admitted AND reason = $reason))"""
