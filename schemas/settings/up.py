"""The supervisor `clawstream up`."""

from __future__ import annotations

from pydantic import Field

from schemas.settings.base import Positive, Section


class UpSettings(Section):
    """`clawstream up`: all processes on one machine."""

    processes: tuple[str, ...] = Field(
        ("broker", "gateway", "assemble", "reward", "admit", "lake", "trainer", "rollout"),
        description="leave some out, or run them elsewhere",
    )
    restart_delay_s: Positive = Field(
        1.0, description="wait before a restart; doubles up to 30 s while it fails"
    )
    drain_timeout_s: Positive = Field(60.0, description="longest wait for lag 0 when stopping")
    stop_timeout_s: Positive = Field(
        45.0, description="longest wait for one process to end before SIGKILL"
    )
