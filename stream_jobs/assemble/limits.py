"""The limits of the fold. `clawstream.stream_jobs.assemble.fold` says what happens at each."""

from __future__ import annotations

from dataclasses import dataclass

from clawstream.schemas.settings import Settings
from clawstream.schemas.topics import MAX_MESSAGE_BYTES

STEPS_MAX = 5_000
"""Maximum number of steps per trajectory. The cost of a step, of closing and of a candidate grows
with it.
"""
PAYLOAD_MAX = 256 << 20
"""Maximum payload per trajectory, bytes. All of it is in memory at closing, and several times as
much while it is sent.
"""
PAYLOAD_BYTES = MAX_MESSAGE_BYTES - (1 << 20)
"""Maximum size of a step's payload and of a trajectory's metadata: each must fit into an output
record.
"""
SILENT_TICKS, SILENT_AT_LEAST_S = 10, 10.0
"""A partition that misses this many ticks was silent: no Kafka, or no worker."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the fold. Times are ms of log time.

    Attributes:
        closed_max, waiting_max: Records per partition; bounds on memory. A long trajectory
            counts as several.
        waiting_bytes_max: The same in bytes, of the records that wait for their target.
        silent_after: How much of an interval without records counts (`log_time`); None: all of
            it.
        steps_max, payload_max: Steps and payload bytes per trajectory. The step that reaches one
            closes the trajectory.
        train_truncated: See `jobs.train_truncated`.
        new_messages_bytes: See `jobs.new_messages_bytes`; 0: none.
    """

    trajectory_timeout: int
    closed_horizon: int
    orphan_after: int
    closed_max: int
    anonymous_inactivity: int = 300_000
    agent_inactivity: int = 1_800_000
    silent_after: int | None = None
    waiting_max: int = 100_000
    waiting_bytes_max: int = 64 << 20
    steps_max: int = STEPS_MAX
    payload_max: int = PAYLOAD_MAX
    train_truncated: bool = False
    new_messages_bytes: int = 0

    @property
    def longest(self) -> int:
        """Return the longest time-out, ms."""
        return max(
            self.trajectory_timeout,
            self.closed_horizon,
            self.orphan_after,
            self.anonymous_inactivity,
            self.agent_inactivity,
        )


def limits_of(settings: Settings) -> Limits:
    """Return the limits of the fold."""
    jobs = settings.jobs
    return Limits(
        trajectory_timeout=round(jobs.trajectory_timeout_s * 1000),
        closed_horizon=round(jobs.closed_horizon_s * 1000),
        orphan_after=round(jobs.orphan_after_s * 1000),
        closed_max=jobs.closed_max,
        anonymous_inactivity=round(jobs.anonymous_inactivity_s * 1000),
        agent_inactivity=round(jobs.agent_inactivity_s * 1000),
        silent_after=round(max(SILENT_TICKS * jobs.tick_interval_s, SILENT_AT_LEAST_S) * 1000),
        train_truncated=jobs.train_truncated,
        new_messages_bytes=jobs.new_messages_limit(),
    )
