"""Dependencies of the routes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clawstream.gateway.asgi.client_disconnect import Receive
from clawstream.gateway.asgi.in_flight_limits import InFlightLimits
from clawstream.gateway.asgi.messages import HeldBody, Scope, admit
from clawstream.gateway.attribution.resolver import TrajectoryResolver
from clawstream.gateway.auth.api_keys import Scope as KeyScope
from clawstream.gateway.auth.authenticator import Authenticator, Principal
from clawstream.gateway.auth.key_limits import KeyLimits
from clawstream.gateway.clock import Clock
from clawstream.gateway.continuation.memory import ContinuationMemory
from clawstream.gateway.durability.delivery import DeliveryManager
from clawstream.gateway.durability.record_writer import RecordWriter
from clawstream.gateway.engines.pool import EnginePool
from clawstream.gateway.metrics import Metrics
from clawstream.gateway.proxy.failed_calls import FailedCalls
from clawstream.gateway.proxy.forwarding import PassedHeaders
from clawstream.schemas.settings import Settings


@dataclass(frozen=True, slots=True)
class Services:
    """Dependencies of the routes."""

    settings: Settings
    authenticator: Authenticator
    trajectories: TrajectoryResolver
    delivery: DeliveryManager
    record_writer: RecordWriter
    engines: EnginePool
    clock: Clock
    metrics: Metrics
    in_flight: InFlightLimits
    failed: FailedCalls
    limits: KeyLimits
    continuations: ContinuationMemory
    passed: PassedHeaders
    gives_own_traces: bool

    def admit(self, scope: Scope, headers: Mapping[str, str], needed: KeyScope) -> Principal:
        """Return the caller of a request; call it before the body is read.

        Raises:
            WrongKey, Forbidden: See `Authenticator.authenticate`.
        """
        caller = self.authenticator.authenticate(headers, needed)
        admit(scope)
        return caller


def held_body(receive: Receive, services: Services) -> HeldBody:
    """Read a request body of at most gateway.max_body_bytes, see `HeldBody`."""
    return HeldBody(receive, services.settings.gateway.max_body_bytes, services.in_flight)
