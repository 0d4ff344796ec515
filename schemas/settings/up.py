"""The supervisor `clawstream up`, and what all processes show: metrics and traces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from clawstream.schemas.settings.base import Port, Positive, Secret, Section


class UpSettings(Section):
    """`clawstream up`: all processes on one machine."""

    processes: tuple[str, ...] = Field(
        (
            *("broker", "gateway", "assemble", "reward", "compare", "admit", "lake", "trainer"),
            *("rollout", "traces", "monitor"),
        ),
        description="leave some out, or run them elsewhere",
    )
    restart_delay_s: Positive = Field(
        1.0, description="wait before a restart; doubles up to 30 s while it fails"
    )
    drain_timeout_s: Positive = Field(60.0, description="longest wait for lag 0 when stopping")
    stop_timeout_s: Positive = Field(
        45.0, description="longest wait for one process to end before SIGKILL"
    )


METRICS_PORTS = (
    *("monitor", "assemble", "reward", "compare", "admit", "lake", "trainer", "traces", "rollout"),
)
"""The processes in the order of their ports. The gateway's metrics are on its own port."""


class MetricsSettings(Section):
    """`/metrics` of every process, for Prometheus."""

    host: str = Field("127.0.0.1", description="Prometheus on another machine")
    port: Port | None = Field(
        None,
        description="first port of the metrics, the monitor's; those of assemble, reward, compare, "
        "admit, lake, trainer, traces and the rollout workers follow in this order; default: none "
        "are served, and `up` starts no monitor",
    )

    def port_of(self, process: str) -> int | None:
        """Return the port of a process; None: its metrics are not served here."""
        if self.port is None or process not in METRICS_PORTS:
            return None
        return self.port + METRICS_PORTS.index(process)

    def after(self, processes: int) -> MetricsSettings:
        """Return the settings of a process behind so many others of its name."""
        port = None if self.port is None else self.port + processes
        return self.model_copy(update={"port": port})


TRACES_PATH = "/v1/traces"


class TracesSettings(Section):
    """`clawstream traces`: calls, trajectories, batches and versions as OpenTelemetry spans."""

    endpoint: Annotated[str | None, Secret("all")] = Field(
        None,
        description="base URL of an OTLP/HTTP receiver, e.g. http://localhost:4318; /v1/traces is "
        "added; default: no spans, and `up` starts no traces",
    )
    headers: Annotated[Mapping[str, str], Secret()] = Field(
        {}, description="of each request, e.g. Authorization; secret: never written to a file"
    )
    service_name: str = Field(
        "clawstream",
        min_length=1,
        description="several installations on one collector; the part is appended, "
        "e.g. clawstream-gateway",
    )
    calls_without_context: Literal["skip", "own_trace"] = Field(
        "skip",
        description="own_trace: also trace calls whose client sends no traceparent, a trace for "
        "each trajectory key",
    )

    @field_validator("endpoint")
    @classmethod
    def _is_a_url(cls, endpoint: str | None) -> str | None:
        if endpoint is not None:
            parts = urlsplit(endpoint)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
                raise ValueError("must be a URL such as http://localhost:4318")
            if parts.username is not None:  # the endpoint is logged and written to a file
                raise ValueError("holds a login; put it into traces.headers")
        return endpoint

    @property
    def url(self) -> str | None:
        """Where spans are posted."""
        if self.endpoint is None:
            return None
        base = self.endpoint.rstrip("/")
        return base if base.endswith(TRACES_PATH) else base + TRACES_PATH

    @property
    def gives_own_traces(self) -> bool:
        """Whether calls without a trace context get a trace."""
        return self.endpoint is not None and self.calls_without_context == "own_trace"
