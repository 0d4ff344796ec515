"""SQL functions that decide as admission does, as text in and text out. Pure.

`quality.sql` passes candidates and policies as JSON, which DuckDB writes and msgspec reads
several times as fast as Arrow becomes Python objects. The rules are those of
`clawstream.stream_jobs.admit`.
"""

from __future__ import annotations

import json
from functools import cache, lru_cache
from typing import Any

import msgspec

from clawstream.schemas.records import AdmissionPolicy
from clawstream.stream_jobs.admit.eligibility import readiness, unmet_step_conditions
from clawstream.stream_jobs.admit.group import ClosedMember, refusals


def readiness_json(member: str, policy: str, newest: int | None) -> str:
    """Return the `Readiness` of a trajectory as a JSON object.

    Args:
        member: A `ClosedMember`.
        policy: An `AdmissionPolicy`.
        newest: Sync index of the newest version; None: there is none.
    """
    asked = _decoded(ClosedMember, member)
    has_payload = asked.place is not None
    return _encoded(readiness(asked.candidate, _policy(policy), has_payload, newest)._asdict())


def unmet_step_conditions_json(member: str, policy: str, newest: int | None) -> str:
    """Return the unmet conditions of each step, as JSON. Arguments as in `readiness_json`."""
    candidate, applied = _decoded(ClosedMember, member).candidate, _policy(policy)
    return _encoded(
        [
            unmet_step_conditions(step, candidate.channel, applied, newest)
            for step in candidate.steps
        ]
    )


def refusals_json(members: str, policy: str, newest: int | None) -> str:
    """Return the reason for each member of a group as a JSON array; null: it is admitted.

    Args:
        members: An array of `ClosedMember`.
        policy: An `AdmissionPolicy`.
        newest: Sync index of the newest version; None: there is none.
    """
    return _encoded(refusals(_decoded(list[ClosedMember], members), _policy(policy), newest))


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


@lru_cache(maxsize=64)
def _policy(text: str) -> AdmissionPolicy:
    policy: AdmissionPolicy = _decoded(AdmissionPolicy, text)
    return policy


def _decoded(kind: Any, text: str) -> Any:
    """Decode JSON to records.

    A number may be NaN, and a column that a file lacks is null: then its field has its default.
    """
    try:
        return _decoder(kind).decode(text)
    except msgspec.DecodeError:
        return msgspec.convert(json.loads(text, object_hook=_without_nulls), kind)


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode()
