"""The filters of the list of trajectories: from the address to SQL with bound parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any, NamedTuple

from clawstream.inspector.errors import InvalidAddress
from clawstream.inspector.queries.lake import Lake

TEXT_CHARACTERS = 400
"""Of a search: each word of it is a query of the index, and all are one query of the list."""
OUTCOMES = ("completed", "failed", "abandoned", "timed_out", "lost", "replaced")
STAGES = ("admitted", "refused", "undecided")
PLACES = ("sort", "rows", "before_key", "before_at", "before_id")
"""Parameters of a list that select no rows."""
_EQUAL = ("run_id", "group_id", "channel", "outcome")
_CHOICES = {"outcome": OUTCOMES, "stage": STAGES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """What the list shows; None: anything.

    agent: part of the user agent or model. task: part of the metadata or group. version: sync
    index among the trainable tokens; oldest_version: the lowest one of them. text: words of
    requests and replies. stage: what admission said. reason: why it is not rewarded, not trainable
    or refused, as the funnel names it.
    """

    run_id: str | None = None
    agent: str | None = None
    task: str | None = None
    channel: str | None = None
    group_id: str | None = None
    version: int | None = None
    oldest_version: int | None = None
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
    """Read filters from the parameters of an address; an empty value is none.

    Raises:
        InvalidAddress: a parameter is not known, or its value cannot be read. Without it a
            misspelled filter would select everything.
    """
    kinds = {f.name: str(f.type).partition(" ")[0] for f in fields(Filters)}
    given: dict[str, Any] = {}
    for name, text in query.items():
        if name in PLACES or not text.strip():
            continue
        if name not in kinds:
            raise InvalidAddress(f"there is no filter {name[:40]!r}; there are {', '.join(kinds)}")
        given[name] = _value(name, kinds[name], text.strip())
    return Filters(**given)


def _value(name: str, kind: str, text: str) -> Any:
    """Read a value. Raises InvalidAddress."""
    if name == "text" and len(text) > TEXT_CHARACTERS:
        raise InvalidAddress(f"a search for texts has at most {TEXT_CHARACTERS} characters")
    if name in _CHOICES and text not in _CHOICES[name]:
        raise InvalidAddress(f"filter {name}: {text[:40]!r} is none of {', '.join(_CHOICES[name])}")
    if kind == "str":
        return text
    try:
        value = int(text) if kind == "int" else float(text)
        if not isfinite(value) or (kind == "int" and not -(2**63) <= value < 2**63):
            raise ValueError
    except (ValueError, OverflowError):
        what = "a whole number" if kind == "int" else "a number"
        raise InvalidAddress(f"filter {name}: {text[:40]!r} is not {what}") from None
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
    if "oldest_version" in given:
        yield "c.oldest_sync_index = $oldest_version"
    if "agent" in given:
        yield """(c.run_id, c.trajectory_key) IN (SELECT (run_id, trajectory_key) FROM calls
            WHERE contains(lower(user_agent), lower($agent)) OR model = $agent)"""
    if "task" in given:
        yield """(contains(lower(c.group_id), lower($task)) OR (c.run_id, c.trajectory_id) IN
            (SELECT (run_id, trajectory_id) FROM payloads
             WHERE contains(lower(metadata_json), lower($task))))"""
    if filters.stage == "admitted":
        yield "c.batch_seq IS NOT NULL"
    elif filters.stage is not None:
        is_in = "IN" if filters.stage == "refused" else "NOT IN"
        yield f"""c.batch_seq IS NULL AND (c.run_id, c.trajectory_id) {is_in}
            (SELECT (run_id, trajectory_id) FROM members WHERE NOT admitted)"""
    if "reason" in given:
        yield """(c.reason = $reason OR (c.reward IS NULL AND c.unrewarded_reason = $reason)
            OR (c.run_id, c.trajectory_id) IN (SELECT (run_id, trajectory_id) FROM members
                WHERE NOT admitted AND reason = $reason))"""
