"""Whether an engine may be asked: a circuit breaker, a pure fold over what its calls and probes said. Times are given, in seconds.

    closed      calls go to it. It opens when a connection could not be made, after FAILURES calls in a row that broke or were
                answered 502 or 503 before anything else, or after MISSED probes in a row without an answer.
    open        no call goes to it. The pause doubles with each opening, until a call has succeeded again.
    half-open   the pause is over: a probe that succeeds closes it. Where nothing is probed, one call may try: its success closes the
                circuit, its failure opens it again.

A call that was in flight when the circuit opened says nothing about new ones: an engine that shuts down still ends its old calls.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import orjson

from gateway.protocols.base import EngineKind

FAILURES = 3
MISSED = 3
PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0

By = Literal["call", "half_open", "probe"]


@dataclass(frozen=True, slots=True)
class Circuit:
    """failures, missed: in a row. openings: since a call last succeeded. open_until_s None: closed. half_open: a trial is under way."""

    failures: int = 0
    missed: int = 0
    openings: int = 0
    open_until_s: float | None = None
    half_open: bool = False


CLOSED = Circuit()


class Answered(NamedTuple):
    """The engine answered something sensible; a probe, or the first of a call's reply."""

    by: By
    at_s: float


class Failed(NamedTuple):
    """It did not. surely: no connection could be made, so no other call would fare better."""

    by: By
    at_s: float
    surely: bool = False


class HalfOpenStarted(NamedTuple):
    """A trial begins."""


class HalfOpenCancelled(NamedTuple):
    """A trial ended without telling anything: its client left."""


Event = Answered | Failed | HalfOpenStarted | HalfOpenCancelled


def fold(circuit: Circuit, event: Event) -> Circuit:
    """The circuit after an event."""
    match event:
        case HalfOpenStarted():
            return replace(circuit, half_open=True)
        case HalfOpenCancelled():
            return replace(circuit, half_open=False)
        case Answered(by, at_s):
            return _answered(circuit, by, at_s)
        case Failed(by, at_s, surely):
            return _failed(circuit, by, at_s, surely)


def _answered(circuit: Circuit, by: By, at_s: float) -> Circuit:
    if circuit.open_until_s is None:
        return replace(circuit, missed=0) if by == "probe" else Circuit(missed=circuit.missed)
    if by == "call" or (by == "probe" and at_s < circuit.open_until_s):
        return circuit
    return Circuit() if by == "half_open" else Circuit(openings=circuit.openings)


def _failed(circuit: Circuit, by: By, at_s: float, surely: bool) -> Circuit:
    if circuit.open_until_s is not None:
        return _opened(circuit, at_s) if by == "half_open" else circuit
    failures, missed = circuit.failures + (by != "probe"), circuit.missed + (by == "probe")
    if surely or failures >= FAILURES or missed >= MISSED:
        return _opened(circuit, at_s)
    return replace(circuit, failures=failures, missed=missed)


def _opened(circuit: Circuit, at_s: float) -> Circuit:
    pause = min(LONGEST_PAUSE_S, PAUSE_S * 2.0**circuit.openings)
    return Circuit(openings=min(circuit.openings + 1, 16), open_until_s=at_s + pause)


def admits(circuit: Circuit, at_s: float, probed: bool) -> bool:
    """Whether a call may go there now. If the circuit is not closed, that call is its trial."""
    if circuit.open_until_s is None:
        return True
    return not probed and not circuit.half_open and at_s >= circuit.open_until_s


def kind_of(status: int, told: bool, body: bytes) -> EngineKind | None:
    """What the answer to `GET /version` says of an engine; None: nothing, it is not up. told: it carries our header."""
    if status >= 500 or status == 429:
        return None
    if status == 200 and told:
        return "captured"
    try:
        version = orjson.loads(body)
    except orjson.JSONDecodeError:
        return "text"
    known = status == 200 and isinstance(version, dict) and isinstance(version.get("version"), str)
    return "vllm" if known else "text"
