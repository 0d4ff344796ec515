"""The supervisor `clawstream up`, and the metrics of all processes."""

from __future__ import annotations

from pydantic import Field

from schemas.settings.base import Port, Positive, Section


class UpSettings(Section):
    """`clawstream up`: all processes on one machine."""

    processes: tuple[str, ...] = Field(
        (
            *("broker", "gateway", "assemble", "reward", "compare", "admit", "lake", "trainer"),
            *("rollout", "monitor"),
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
    *("monitor", "assemble", "reward", "compare", "admit", "lake", "trainer", "rollout"),
)
"""The processes in the order of their ports. The gateway's metrics are on its own port."""


class MetricsSettings(Section):
    """`/metrics` of every process, for Prometheus."""

    host: str = Field("127.0.0.1", description="Prometheus on another machine")
    port: Port | None = Field(
        None,
        description="first port of the metrics, the monitor's; those of assemble, reward, compare, "
        "admit, lake, trainer and the rollout workers follow in this order; default: none are "
        "served, and `up` starts no monitor",
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
