"""The stream jobs `assemble` and `reward`, and user functions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from schemas.settings.base import Count, Name, Positive, Section


class FunctionSettings(Section):
    """Reward functions and quality rules of your own; see docs/reward-functions.md."""

    dirs: tuple[Path, ...] = Field(
        (),
        description="where their files and modules are; default: the working directory, then the config file's folder",
    )
    timeout_s: Positive = Field(
        30.0, description="functions that ask a model; one that takes longer gives no reward"
    )
    processes: Count = Field(
        2, description="functions that wait or compute long: as many run at once"
    )

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(folder.absolute() for folder in self.dirs or (Path(),))


class JobsSettings(Section):
    """The stream jobs `assemble` and `reward`."""

    worker_id: Name | None = Field(
        None,
        description="one fixed name each, under which a worker that is started again gets its partitions back at once; default: "
        "host and process id, so that no two are the same",
    )
    batch_records: Count = Field(500, description="latency against throughput")
    snapshot_min_bytes: Count = Field(
        4 << 20, description="shorter recovery against more state log"
    )
    session_timeout_s: Positive = Field(6.0, description="how soon a dead worker's partitions move")
    tick_interval_s: Positive = Field(1.0, description="resolution of time-outs")
    write_ticks: bool = Field(
        True, description="copied topics have the ticks of their source and must get no others"
    )
    trajectory_timeout_s: Positive = Field(
        3600.0, description="agents that think longer between two calls"
    )
    closed_horizon_s: Positive = Field(
        86400.0, description="how long after closing a reward still finds its trajectory"
    )
    closed_max: Count = Field(50_000, description="memory of closed trajectories a partition")
    orphan_after_s: Positive = Field(600.0, description="rewards that come long before their steps")
    cache_mb: Count = Field(1024, description="memory for payload of open trajectories")
    bucket_inactivity_s: Positive = Field(
        300.0,
        description="agents that name no trajectory and pause longer between two calls, or rewards sooner",
    )
    agent_inactivity_s: Positive = Field(
        1800.0,
        description="known agents whose people pause longer between two calls, or rewards sooner",
    )
    train_truncated: bool = Field(
        False,
        description="agents that can't do without top_p, top_k, min_p, penalties or a grammar: every ratio is off",
    )
    reward_functions: Mapping[str, tuple[str, ...]] = Field(
        {},
        description="run id (or *) to `name@version`, `file.py:function@version` or `module:function@version`",
    )
    quality_functions: Mapping[str, tuple[str, ...]] = Field(
        {},
        description="run id (or *) to quality rules, named in the same way, or to `built_in`; see docs/quality.md",
    )
