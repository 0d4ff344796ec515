"""The circuit breaker of an engine: a pure fold over the results of its calls and probes.

    closed      The engine gets calls. The circuit opens when a connection fails, after FAILURES
                calls in a row that broke or got the status 502 or 503, or after MISSED probes in a
                row without an answer.
    open        The engine gets no calls. The pause doubles with each opening until a call succeeds.
    half-open   The pause is over. A successful probe closes the circuit. An engine without probes
                gets one trial call: its success closes the circuit, its failure opens it again.

The result of a call that was in flight when the circuit opened is ignored: an engine that shuts
down still finishes its old calls. Times are arguments, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

FAILURES = 3
MISSED = 3
PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0

By = Literal["call", "half_open", "probe"]


@dataclass(frozen=True, slots=True)
class Circuit:
    """The state of a circuit.

    failures: Failed calls in a row.
    missed: Failed probes in a row.
    openings: Openings since the last successful call.
    open_until_s: End of the pause; None: closed.
    half_open: A trial call is in flight.
    """

    failures: int = 0
    missed: int = 0
    openings: int = 0
    open_until_s: float | None = None
    half_open: bool = False


CLOSED = Circuit()


class Answered(NamedTuple):
    """A probe succeeded, or a call got the start of a valid reply."""

    by: By
    at_s: float


class Failed(NamedTuple):
    """A call or probe failed. surely: The connection failed, so other calls would fail as well."""

    by: By
    at_s: float
    surely: bool = False


class HalfOpenStarted(NamedTuple):
    """A trial call begins."""


class HalfOpenCancelled(NamedTuple):
    """A trial call ended without a result because its client disconnected."""


Event = Answered | Failed | HalfOpenStarted | HalfOpenCancelled


def fold(circuit: Circuit, event: Event) -> Circuit:
    """Return the circuit after an event."""
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
    """Return whether the engine may get a call now.

    If the circuit is not closed, that call is its trial call.

    Args:
        circuit: The circuit of the engine.
        at_s: The current time.
        probed: Probes check the engine, so it needs no trial call.
    """
    if circuit.open_until_s is None:
        return True
    return not probed and not circuit.half_open and at_s >= circuit.open_until_s
