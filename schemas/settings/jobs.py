"""The stream jobs `assemble`, `reward` and `compare`, and user functions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from clawstream.schemas.rule_spec import is_own, name_in, of_run
from clawstream.schemas.settings.base import Count, Positive, Section
from clawstream.schemas.settings.reward_models import (
    RewardModel,
    compares,
    reads_messages,
    source_of,
)

NEW_MESSAGES_BYTES = 16 << 10


class FunctionSettings(Section):
    """Reward functions and quality rules of your own; see docs/reward-functions.md."""

    dirs: tuple[Path, ...] = Field(
        (),
        description="folders of files and modules; default: working directory, config file's "
        "folder",
    )
    timeout_s: Positive = Field(
        30.0, description="longest time of one call; a slower function gives no reward"
    )
    processes: Count = Field(2, description="child processes that run functions")
    concurrency: Count = Field(
        32, description="calls of an async function at once in a process, and the largest batch"
    )
    memory_mb: Annotated[int, Field(ge=64)] = Field(
        4096, description="private memory of a process; a function that needs more gives no reward"
    )

    @property
    def calls_at_once(self) -> int:
        """Return the largest number of calls in progress."""
        return self.processes * self.concurrency

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(folder.absolute() for folder in self.dirs or (Path(),))


class JobsSettings(Section):
    """The stream jobs `assemble`, `reward` and `compare`."""

    worker_id: str | None = Field(
        None,
        description="fixed name per worker: a restarted worker gets its partitions back; default: "
        "host and process id",
    )
    batch_records: Count = Field(500, description="latency against throughput")
    snapshot_min_bytes: Count = Field(
        4 << 20, description="shorter recovery against more changelog"
    )
    session_timeout_s: Positive = Field(6.0, description="how soon a dead worker's partitions move")
    tick_interval_s: Positive = Field(1.0, description="resolution of time-outs")
    write_ticks: bool = Field(
        True, description="false for topics of a replay, which have the times of their source"
    )
    trajectory_timeout_s: Positive = Field(
        3600.0,
        description="longest pause between two calls of a trajectory; then it closes as timed_out",
    )
    closed_horizon_s: Positive = Field(
        86400.0, description="how long after closing a reward still finds its trajectory"
    )
    closed_max: Count = Field(50_000, description="memory of closed trajectories a partition")
    orphan_after_s: Positive = Field(600.0, description="how long a reward waits for its step")
    cache_mb: Count = Field(1024, description="memory for payload of open trajectories")
    anonymous_inactivity_s: Positive = Field(
        300.0, description="longest pause in a conversation of an agent that names no trajectory"
    )
    agent_inactivity_s: Positive = Field(
        1800.0, description="longest pause in a session of a known agent"
    )
    train_truncated: bool = Field(
        False,
        description="train tokens sampled with top_p, top_k, min_p, penalties or a grammar: "
        "biased ratios",
    )
    new_messages_bytes: Annotated[int, Field(ge=0, le=256 << 10)] | None = Field(
        None,
        description="messages that a request adds, kept with its step for reward functions; 0: "
        f"none; default: {NEW_MESSAGES_BYTES} if one of reward_models reads them, else 0",
    )
    reward_functions: Mapping[str, tuple[str, ...]] = Field(
        {},
        description="run id (or *) to `name@version`, `file.py:function@version` or "
        "`module:function@version`",
    )
    reward_models: Mapping[Annotated[str, Field(pattern=r"^[^:@]+$")], RewardModel] = Field(
        {}, description="name for `reward_functions` to a reward with settings, by its `type`"
    )
    quality_functions: Mapping[str, tuple[str, ...]] = Field(
        {},
        description="run id (or *) to quality rules, named alike, or to `built_in`; see "
        "docs/quality.md",
    )

    def model_of(self, spec: str) -> RewardModel | None:
        """Return the reward model that a function in `reward_functions` names, if it is one."""
        return None if is_own(spec) else self.reward_models.get(name_in(spec))

    def child_functions(self, run_id: str) -> int:
        """Return how many functions and reward models of a run the reward job calls in child
        processes.
        """
        return sum(map(is_own, of_run(self.quality_functions, run_id))) + sum(
            is_own(spec) or (self.model_of(spec) is not None and not self.compares(spec))
            for spec in of_run(self.reward_functions, run_id)
        )

    def reward_name(self, spec: str) -> str:
        """Return the `source/name` of the rewards of a function in `reward_functions`."""
        model = self.model_of(spec)
        return f"{source_of(model) if model is not None else 'rule'}/{name_in(spec)}"

    def compares(self, spec: str) -> bool:
        """Return whether a function in `reward_functions` compares the members of a group."""
        return compares(self.model_of(spec))

    @property
    def compares_groups(self) -> bool:
        """Whether some run has a function that compares the members of a group."""
        return any(
            self.compares(spec) for specs in self.reward_functions.values() for spec in specs
        )

    def new_messages_limit(self) -> int:
        """Return the bytes of a request's new messages that its step keeps; 0: none."""
        if self.new_messages_bytes is not None:
            return self.new_messages_bytes
        return NEW_MESSAGES_BYTES if any(map(reads_messages, self.reward_models.values())) else 0

    @model_validator(mode="after")
    def _messages_are_kept(self) -> JobsSettings:
        for name, model in self.reward_models.items():
            if reads_messages(model) and not self.new_messages_limit():
                raise ValueError(f"reward_models.{name} reads messages: set new_messages_bytes")
        return self
