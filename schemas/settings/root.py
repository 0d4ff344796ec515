"""The root of all settings: the sections, the checks across sections, and derived values."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from pydantic import Field, model_validator

from clawstream.schemas.claw_r1 import SECTION, without_claw_r1
from clawstream.schemas.ids import RUN_ID
from clawstream.schemas.rule_spec import is_own, of_run
from clawstream.schemas.settings.admit import AdmitSettings
from clawstream.schemas.settings.base import HIGHEST_PORT, Section
from clawstream.schemas.settings.demo import DemoSettings
from clawstream.schemas.settings.gateway import GatewaySettings
from clawstream.schemas.settings.jobs import FunctionSettings, JobsSettings
from clawstream.schemas.settings.kafka import BrokerSettings, KafkaSettings
from clawstream.schemas.settings.lake import LakeSettings
from clawstream.schemas.settings.reward_models import Classifier, CodeTests, Judge, RewardModel
from clawstream.schemas.settings.rollout import ENGINE_STOP_S, RolloutSettings
from clawstream.schemas.settings.trainer import TrainerSettings
from clawstream.schemas.settings.up import (
    METRICS_PORTS,
    MetricsSettings,
    TracesSettings,
    UpSettings,
)

REWARD_ROOM_S = 2.0
"""Between the time-out of a reward model and that of its process."""
COMPARISON_ROOM_S = 5.0
"""Between a comparison's end and its group's deadline: its rewards have to reach admission."""


class Settings(Section):
    """Everything. The name of a field, with dots, is the name on the command line."""

    run_id: str = Field(
        "default", pattern=f"^{RUN_ID.pattern}$", description="experiments side by side"
    )
    data_dir: Path = Field(Path("data"), description="where everything is kept")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="more or fewer lines"
    )
    kafka: KafkaSettings = KafkaSettings()
    broker: BrokerSettings = BrokerSettings()
    gateway: GatewaySettings = GatewaySettings()
    functions: FunctionSettings = FunctionSettings()
    jobs: JobsSettings = JobsSettings()
    admit: AdmitSettings = AdmitSettings()
    lake: LakeSettings = LakeSettings()
    trainer: TrainerSettings = TrainerSettings()
    rollout: RolloutSettings = RolloutSettings()
    up: UpSettings = UpSettings()
    metrics: MetricsSettings = MetricsSettings()
    traces: TracesSettings = TracesSettings()
    demo: DemoSettings = DemoSettings()

    @model_validator(mode="before")
    @classmethod
    def _from_claw_r1(cls, tree: Any) -> Any:
        return without_claw_r1(tree) if isinstance(tree, dict) and SECTION in tree else tree

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        if 2 * self.jobs.trajectory_timeout_s > self.kafka.steps_retention_s:
            raise ValueError(
                f"jobs.trajectory_timeout_s={self.jobs.trajectory_timeout_s:g} is above half of "
                f"kafka.steps_retention_s={self.kafka.steps_retention_s:g}: payload could be "
                "gone before its trajectory closes"
            )
        for name, value in (
            ("jobs.trajectory_timeout_s", self.jobs.trajectory_timeout_s),
            ("jobs.anonymous_inactivity_s", self.jobs.anonymous_inactivity_s),
            ("jobs.agent_inactivity_s", self.jobs.agent_inactivity_s),
            ("jobs.orphan_after_s", self.jobs.orphan_after_s),
            ("gateway.spool_max_age_s", self.spool_max_age_s),
            ("admit.policy.reward_deadline_s", self.admit.policy.reward_deadline_s),
            ("admit.policy.group_deadline_s", self.admit.policy.group_deadline_s),
        ):
            if self.jobs.closed_horizon_s <= value:
                raise ValueError(
                    f"jobs.closed_horizon_s={self.jobs.closed_horizon_s:g} must exceed "
                    f"{name}={value:g}"
                )
        if (
            self.rollout.drain_timeout_s is not None
            and self.rollout.drain_timeout_s > self._drain_room_s
        ):
            raise ValueError(
                f"rollout.drain_timeout_s={self.rollout.drain_timeout_s:g} must be at least "
                f"{ENGINE_STOP_S + 1:g} below "
                f"up.stop_timeout_s={self.up.stop_timeout_s:g}: the worker would be killed while "
                "it waits"
            )
        for table, days in self.lake.retention_days.items():
            if days * 86400 <= self.spool_max_age_s:
                raise ValueError(
                    f"lake.retention_days.{table}={days:g} must exceed "
                    f"gateway.spool_max_age_s={self.spool_max_age_s:g}: a record "
                    "that comes out of a spool would be written again"
                )
        self._check_awaited()
        self._check_reward_models()
        self._check_comparisons()
        self._check_ports()
        if self.rollout.mode == "sync" and self.admit.policy.max_staleness:
            raise ValueError(
                f"admit.policy.max_staleness={self.admit.policy.max_staleness}, but "
                "rollout.mode=sync trains the newest version's own samples: leave it out, or set "
                "rollout.mode=async"
            )
        return self

    @property
    def names_functions(self) -> bool:
        """Whether a function of the user's own is named anywhere."""
        jobs, gateway = self.jobs, self.gateway
        named = [
            *jobs.reward_functions.values(),
            *jobs.quality_functions.values(),
            gateway.redaction.rules,
        ]
        return any(is_own(spec) for specs in named for spec in specs) or is_own(
            gateway.compute_reward or ""
        )

    def _check_comparisons(self) -> None:
        """Refuse a deadline of groups that leaves no time to compare their members."""
        if self.jobs.compares_groups and self.comparison_wait_s <= 0:
            raise ValueError(
                f"admit.policy.group_deadline_s={self.admit.policy.group_deadline_s:g} must exceed "
                f"functions.timeout_s={self.functions.timeout_s:g} by more than "
                f"{COMPARISON_ROOM_S:g}: before it, a judge with per=group waits for members that "
                "are missing and compares the others"
            )

    def _check_ports(self) -> None:
        """Refuse a first port whose last one does not exist."""
        more = self.rollout.workers - 1
        for name, first, last in (
            ("broker.port", self.broker.port, 10 * (self.broker.cluster_size - 1) + 1),
            ("rollout.port", self.rollout.port, more),
            ("metrics.port", self.metrics.port or 0, len(METRICS_PORTS) - 1 + more),
        ):
            if first + last > HIGHEST_PORT:
                raise ValueError(
                    f"{name}={first}: ports up to {first + last} would be used; set at most "
                    f"{HIGHEST_PORT - last}"
                )

    def _check_awaited(self) -> None:
        """Refuse a policy that decides before the configured functions have answered."""
        policy = self.admit.policy
        if policy.required_rewards == () and (counted := self._counted_rewards()):
            raise ValueError(
                "admit.policy.required_rewards is empty, but jobs.reward_functions gives run "
                f"{self.run_id} "
                f"{', '.join(counted)}: groups would be decided before these rewards come. Leave "
                "it out, so that "
                "all of them are required, or name those that groups wait for"
            )
        if policy.require_assessment is False and self._assessment_decides():
            raise ValueError(
                "admit.policy.require_assessment is false, but min_quality or min_step_quality "
                "is set beside "
                f"jobs.quality_functions of run {self.run_id}: trajectories would be admitted "
                "before they are "
                "assessed. Leave it out"
            )

    @property
    def reward_models(self) -> dict[str, RewardModel]:
        """The reward models, with the file that judges share."""
        file = self.data_dir.absolute() / "judges.sqlite"
        return {
            name: model.model_copy(update={"cache_file": file})
            if isinstance(model, Judge) and model.cache_file is None
            else model
            for name, model in self.jobs.reward_models.items()
        }

    def _check_reward_models(self) -> None:
        """Refuse limits above those of the process in which the reward model runs."""
        longest = self.functions.timeout_s - REWARD_ROOM_S
        for name, model in self.jobs.reward_models.items():
            if isinstance(model, CodeTests) and model.memory_mb > self.functions.memory_mb:
                raise ValueError(
                    f"jobs.reward_models.{name}.memory_mb={model.memory_mb} is above "
                    f"functions.memory_mb={self.functions.memory_mb}, which also limits what its "
                    "process starts"
                )
            if isinstance(model, Classifier) and model.url is None:
                continue  # its time-out is that of the function
            if model.timeout_s > longest:
                raise ValueError(
                    f"jobs.reward_models.{name}.timeout_s={model.timeout_s:g} must be at least "
                    f"{REWARD_ROOM_S:g} below functions.timeout_s={self.functions.timeout_s:g}: "
                    "its process would be killed first"
                )

    @property
    def comparison_wait_s(self) -> float:
        """Event time that a group waits for missing members before the others are compared.

        The rewards must reach admission before its deadline for the group.
        """
        room = self.functions.timeout_s + COMPARISON_ROOM_S
        return self.admit.policy.group_deadline_s - room

    def _counted_rewards(self) -> tuple[str, ...]:
        """Return `source/name` of the run's functions that count in the training reward."""
        weights = self.admit.policy.reward_weights
        names = dict.fromkeys(
            map(self.jobs.reward_name, of_run(self.jobs.reward_functions, self.run_id))
        )
        return tuple(name for name in names if not weights or name in weights)

    def _assessment_decides(self) -> bool:
        policy = self.admit.policy
        has_threshold = policy.min_quality is not None or policy.min_step_quality is not None
        return has_threshold and bool(of_run(self.jobs.quality_functions, self.run_id))

    @property
    def required_rewards(self) -> tuple[str, ...]:
        """The rewards that each group member needs; default: those of all functions that count."""
        explicit = self.admit.policy.required_rewards
        return self._counted_rewards() if explicit is None else explicit

    @property
    def max_staleness(self) -> int | None:
        """Versions between a batch and its oldest token at most; None: no limit."""
        return 0 if self.rollout.mode == "sync" else self.admit.policy.max_staleness

    @property
    def require_assessment(self) -> bool:
        """Whether groups wait for the quality rules.

        default: if a threshold and rules are configured.
        """
        explicit = self.admit.policy.require_assessment
        return self._assessment_decides() if explicit is None else explicit

    @property
    def bootstrap_servers(self) -> str:
        """The cluster everything talks to."""
        if self.kafka.bootstrap_servers:
            return self.kafka.bootstrap_servers
        step = 10
        hosts = self.broker.hosts or ("127.0.0.1",)
        return ",".join(f"{host}:{self.broker.port + step * i}" for i, host in enumerate(hosts))

    @property
    def replication(self) -> tuple[int, int]:
        """Copies of each topic, and how many must have a record before it is acknowledged."""
        embedded = self.broker.cluster_size if self.kafka.bootstrap_servers is None else 1
        factor = self.kafka.replication_factor or min(3, embedded)
        return factor, self.kafka.min_insync_replicas or max(1, factor - 1)

    @property
    def broker_dir(self) -> Path:
        return self.broker.data_dir or self.data_dir / "broker"

    @property
    def lake_uri(self) -> str:
        return self.lake.uri or str((self.data_dir / "lake").absolute())

    @property
    def spool_dir(self) -> Path:
        return self.gateway.spool_dir or self.data_dir / "spool"

    @property
    def api_keys_file(self) -> Path:
        return self.gateway.api_keys_file or self.data_dir / "api-keys.json"

    @property
    def spool_max_age_s(self) -> float:
        """A trajectory whose records wait longer may be forgotten before they come."""
        return self.gateway.spool_max_age_s or self.jobs.closed_horizon_s / 2

    @property
    def blob_uri(self) -> str:
        return self.gateway.blob_uri or str((self.data_dir / "blobs").absolute())

    @property
    def _drain_room_s(self) -> float:
        return max(1.0, self.up.stop_timeout_s - ENGINE_STOP_S - 1)

    @property
    def rollout_drain_timeout_s(self) -> float:
        return self.rollout.drain_timeout_s or self._drain_room_s

    @property
    def weights_uri(self) -> str:
        """A URL, or an absolute path."""
        return _absolute(self.trainer.weights_uri or str(self.data_dir / "weights"))

    @property
    def checkpoint_dir(self) -> Path:
        return (self.trainer.checkpoint_dir or self.data_dir / "checkpoints").absolute()

    @property
    def checkpoint_uri(self) -> str | None:
        """Of the copies of checkpoints: a URL, or an absolute path."""
        uri = self.trainer.checkpoint_uri
        return None if uri is None else _absolute(uri)

    @property
    def checkpoint_roots(self) -> tuple[str, ...]:
        """Where checkpoints are: on this machine, and their copies."""
        return tuple(filter(None, (str(self.checkpoint_dir), self.checkpoint_uri)))


def _absolute(uri: str) -> str:
    """Return a URL without a slash at its end, or the absolute path of a file URL or a path."""
    if (parts := urlsplit(uri)).scheme == "file":
        uri = unquote(parts.path)
    return uri.rstrip("/") if "://" in uri else str(Path(uri).absolute())
