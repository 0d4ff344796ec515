"""`clawstream replay run`: process recorded data again into topics of its own.

1. Store the plan: offsets of the source topics or versions of the tables. The same name then gives
   the same result.
2. Create the topics of prefix `replay-<name>`, after deleting those of a killed replay.
3. Write the policy, then the output of the fold (`clawstream.ops.replay.fold`): rewards,
   trajectories, candidates.
4. End the run, unless it should stay open. Then run admission to the end of the candidates.

The source is never written to. A trainer, a lake or SQL can continue with the replay's settings
(`settings.yaml`).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from clawstream.ops.replay.fold import OutputRecord, Replay, ReplaySource
from clawstream.ops.replay.record_filter import RecordFilter
from clawstream.ops.replay.report import Outcome, journal
from clawstream.ops.replay.target_prefix import TargetPrefix
from clawstream.ops.replay.topic_source import TopicReplaySource
from clawstream.ops.replay.topic_writer import TopicWriter
from clawstream.runtime.atomic_file import write_durably
from clawstream.runtime.kafka import Cluster
from clawstream.runtime.kafka.window import Window, window_of
from clawstream.runtime.logs import logger
from clawstream.runtime.process.remembered_settings import public, remember
from clawstream.runtime.topics.records import Decoder, cluster_of, create_topics, now_micros
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.ids import check_run_id
from clawstream.schemas.records import AdmissionPolicy, RunEnded, Tick, Trajectory
from clawstream.schemas.rule_spec import of_run
from clawstream.schemas.settings import PolicySettings, Settings
from clawstream.stream_jobs.admit.admitter import ChannelAdmitter
from clawstream.stream_jobs.admit.policy import policy_of
from clawstream.stream_jobs.admit.policy_log import PolicyLog
from clawstream.stream_jobs.assemble.limits import limits_of
from clawstream.stream_jobs.assemble.state.trajectories import STEPS
from clawstream.stream_jobs.errors import PolicyRefused
from clawstream.stream_jobs.reward.evaluate import RuleEvaluator

NAME = re.compile(r"[a-z0-9-]{1,25}")
PROGRESS_S = 10.0
JOB_SETTINGS = {
    *("trajectory_timeout_s", "closed_horizon_s", "closed_max", "orphan_after_s"),
    *("anonymous_inactivity_s", "agent_inactivity_s", "reward_functions", "quality_functions"),
    *("reward_models", "train_truncated", "tick_interval_s", "new_messages_bytes"),
}
"""Settings `jobs.*` on which the result of a replay depends."""


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """What to replay.

    table_versions: Versions of the lake's tables, which are then the source. since_ms, until_ms:
    Log time. as_run: Another run id for the output. keep_rules: Use recorded answers of rules
    instead of asking them. with_steps: Copy the steps. stay_open: Do not end the run; undecided
    groups stay. where: SQL condition over the view `trajectories` (`clawstream.export.selection`);
    empty: all trajectories. It needs table_versions of all tables.
    """

    name: str
    table_versions: Mapping[str, int | None] | None = None
    since_ms: int | None = None
    until_ms: int | None = None
    as_run: str | None = None
    keep_rules: bool = False
    with_steps: bool = False
    stay_open: bool = False
    where: str = ""


def home_of(settings: Settings, name: str) -> Path:
    """The directory of a replay."""
    return settings.data_dir.absolute() / "replays" / name


def replay_settings(settings: Settings, name: str, run_id: str, partitions: int) -> Settings:
    """Return the settings of a replay: same cluster and blobs, everything else separate.

    Raises:
        SettingsError: The name is wrong.
    """
    if not NAME.fullmatch(name):
        raise SettingsError(f"name {name!r}: a replay's name has 1 to 25 of a-z 0-9 -")
    factor, insync = settings.replication
    # The replay's run has the functions of the recorded run: the rewards that its policy requires
    # follow from them.
    functions = {
        name: {**configured, run_id: of_run(configured, settings.run_id)}
        for name in ("reward_functions", "quality_functions")
        if (configured := getattr(settings.jobs, name))
    }
    changes: dict[str, dict[str, Any]] = {
        "kafka": {
            "topic_prefix": f"replay-{name}",
            "partitions": partitions,
            "bootstrap_servers": settings.bootstrap_servers,
            "replication_factor": factor,
            "min_insync_replicas": insync,
        },
        "trainer": {"weights_uri": None, "checkpoint_dir": None, "checkpoint_uri": None},
        "jobs": {"write_ticks": False, **functions},
        "lake": {"uri": None, "storage_options": {}},
        "gateway": {"blob_uri": settings.blob_uri},
    }
    if run_id != settings.run_id:
        # Validation of the recorded versions is none of the versions of another run.
        changes["admit"] = {"channels": ("train",)}
    update = {
        section: getattr(settings, section).model_copy(update=change)
        for section, change in changes.items()
    }
    own = {"run_id": check_run_id(run_id), "data_dir": home_of(settings, name)}
    return settings.model_copy(update={**own, **update})


def run_replay(settings: Settings, request: ReplayRequest) -> dict[str, Any]:
    """Replay the run of the settings and return a report.

    A finished replay only reports again; a killed one starts over.

    Raises:
        SettingsError, LakeError, PrefixTaken, WindowGone, or a KafkaError.
    """
    cluster = cluster_of(settings)
    run_id = request.as_run or settings.run_id
    replay_settings(settings, request.name, run_id, settings.kafka.partitions)  # or an error
    prefix = _target_prefix(settings, cluster, request.name)
    with closing(RuleEvaluator(settings)) as rules, prefix.held():
        begun = prefix.begin(
            identity(settings, request), lambda: _plan(settings, cluster, request, rules)
        )
        if begun.result is not None:
            return {**begun.result, "was_done": True}
        plan = begun.plan
        target = replay_settings(settings, request.name, run_id, plan["partitions"])
        topics = target.kafka.topics
        prefix.make(target, (topics.steps, topics.rewards, topics.trajectories, topics.candidates))
        keep_settings(target)
        policy = replace(policy_of(target, 1, now_micros()), **_policy_fields(plan["policy"]))
        if policy.min_members > policy.group_size:
            raise SettingsError(
                f"setting admit.policy: min_members {policy.min_members} is above group_size "
                f"{policy.group_size}, with the fields of the recorded policy: set both"
            )
        source = _source(settings, cluster, request, plan, rules)
        report = {
            "name": request.name,
            "prefix": topics.prefix,
            "run": run_id,
            **plan,
            **_assemble(target, cluster, request, source, rules, settings.run_id, policy),
        }
        if (newest := report["newest_attempt"]) is not None:
            # No new version id may equal one that recorded tokens name.
            first = max(target.trainer.first_attempt, newest + 1)
            trainer = target.trainer.model_copy(update={"first_attempt": first})
            keep_settings(target.model_copy(update={"trainer": trainer}))
        report |= _admit(target, cluster)
        prefix.done(report)
    return {**report, "was_done": False}


def keep_settings(target: Settings) -> None:
    """Write the settings of a replay into its directory, without secrets."""
    tree, _ = public(target)
    write_durably(target.data_dir / "settings.yaml", json.dumps(tree).encode(), 0o600)
    remember(target)


def identity(settings: Settings, request: ReplayRequest) -> dict[str, Any]:
    """Return everything that the result depends on: it must be the same under the same name."""
    return {
        **asdict(request),
        "source": settings.kafka.topic_prefix,
        "run": settings.run_id,
        "lake": settings.lake_uri,
        "jobs": settings.jobs.model_dump(mode="json", include=JOB_SETTINGS),
        "policy": settings.admit.policy.model_dump(mode="json", exclude_unset=True),
        "channels": list(settings.admit.channels),
    }


def _target_prefix(settings: Settings, cluster: Cluster, name: str) -> TargetPrefix:
    return TargetPrefix(cluster, f"replay-{name}", home_of(settings, name) / "replay.json")


def _plan(
    settings: Settings, cluster: Cluster, request: ReplayRequest, rules: RuleEvaluator
) -> dict[str, Any]:
    """Return what to read and the number of partitions, which is that of the source."""
    policy = _recorded_policy(settings, cluster, request, rules)
    if request.table_versions is not None:
        from clawstream.ops.replay.lake_source import partitions_of, snapshot_versions

        versions = snapshot_versions(settings, request.table_versions)
        partitions = partitions_of(settings, versions)
        return {"from": "lake", "versions": versions, "partitions": partitions, "policy": policy}
    topics, span = settings.kafka.topics, (request.since_ms, request.until_ms)
    windows = [window_of(cluster, topic, *span) for topic in (topics.steps, topics.rewards)]
    return {
        "from": "topics",
        "windows": [w.as_dict() for w in windows],
        "partitions": max(len(w.ranges) for w in windows),
        "policy": policy,
    }


def fields_not_set(policy: PolicySettings) -> set[str]:
    """Return the fields of a recorded policy that the settings do not name."""
    return {
        f"{name.removesuffix('_s')}_ms" if name.endswith("_deadline_s") else name
        for name in PolicySettings.model_fields.keys() - policy.model_fields_set
    }


def _recorded_policy(
    settings: Settings, cluster: Cluster, request: ReplayRequest, rules: RuleEvaluator
) -> dict[str, Any]:
    """Return the fields of the run's newest policy that the settings do not define.

    `required_rewards` and `require_assessment` come from the recorded policy where recorded answers
    count, because the settings need not name the functions that gave them; else from the functions
    of the settings.
    """
    policy, run = settings.admit.policy, settings.run_id
    names = fields_not_set(policy)
    for name, is_set, is_evaluated in (
        ("required_rewards", policy.required_rewards is not None, rules.has_reward_functions(run)),
        ("require_assessment", policy.require_assessment is not None, rules.has_quality_rules(run)),
    ):
        if is_set or (is_evaluated and not request.keep_rules):
            names.discard(name)
        else:
            names.add(name)
    try:
        newest = PolicyLog(settings, cluster).newest
    except PolicyRefused:  # the topic is gone, its records may be in the lake
        return {}
    if newest is None:
        return {}
    # The trainer of the replay has sync_every from the settings, and would refuse another one.
    return {n: v for n, v in asdict(newest.policy).items() if n in names - {"sync_every"}}


def _policy_fields(policy: Mapping[str, Any]) -> dict[str, Any]:
    """Restore the fields of a policy from JSON, which has lists in place of tuples."""
    return {n: tuple(value) if isinstance(value, list) else value for n, value in policy.items()}


def _source(
    settings: Settings,
    cluster: Cluster,
    request: ReplayRequest,
    plan: Mapping[str, Any],
    rules: RuleEvaluator,
) -> ReplaySource:
    run, messages = settings.run_id, limits_of(settings).new_messages_bytes
    record_filter = RecordFilter(
        run,
        request.as_run,
        request.keep_rules or not rules.has_reward_functions(run),
        request.keep_rules or not rules.has_quality_rules(run),
        _selected_keys(settings, request),
    )
    if plan["from"] == "lake":
        from clawstream.ops.replay.lake_source import LakeReplaySource, Span

        span = Span(request.since_ms, request.until_ms)
        return LakeReplaySource(
            settings, plan["versions"], plan["partitions"], span, record_filter, messages
        )
    steps, rewards = map(Window.from_dict, plan["windows"])
    decoder = Decoder(cluster, settings.kafka.topics.schemas)
    return TopicReplaySource(cluster, decoder, steps, rewards, record_filter, messages)


def _selected_keys(settings: Settings, request: ReplayRequest) -> frozenset[str] | None:
    """Return the keys of the trajectories that the condition selects; None: all."""
    if not request.where or request.table_versions is None:
        return None
    condition = f"run_id = '{settings.run_id}' AND ({request.where}\n)"
    # In a process of its own: at the end of one with other threads, such as a trainer's, DuckDB
    # writes 45 lines about leaks.
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        keys = process.submit(_keys, settings, dict(request.table_versions), condition)
        return frozenset(keys.result())


def _keys(settings: Settings, versions: Mapping[str, int | None], condition: str) -> set[str]:
    from clawstream.export.selection import trajectory_keys  # DuckDB, in this process alone

    return trajectory_keys(settings, versions, condition)


def _assemble(
    target: Settings,
    cluster: Cluster,
    request: ReplayRequest,
    source: ReplaySource,
    rules: RuleEvaluator,
    source_run: str,
    policy: AdmissionPolicy,
) -> dict[str, Any]:
    """Write everything up to the candidates; return statistics.

    source_run: The run whose rules are evaluated.
    """

    def evaluate(trajectory: Trajectory) -> list[Any]:
        if request.keep_rules:
            return []
        # The time is not the clock's: a repeated replay must give the same bytes.
        return rules.evaluate(trajectory, trajectory.closed_at * 1000, source_run)

    began, topics, run = time.monotonic(), target.kafka.topics, target.run_id
    writer, codec, limits = TopicWriter(cluster), Codec(), limits_of(target)
    if request.table_versions is not None:
        # The lake has no ticks, so an idle log is indistinguishable from a silent one.
        limits = replace(limits, silent_after=None)
    replay = Replay(
        run,
        target.kafka.partitions,
        limits,
        codec,
        evaluate,
        cluster.topic_id(topics.trajectories),
        target.jobs.cache_mb << 20,
        source.payload,
    )

    def write(*records: OutputRecord) -> None:
        for r in records:
            topic, value = getattr(topics, r.topic), codec.encode(r.event)
            writer.put(topic, r.partition, r.key, value, r.time, r.headers)

    def control(event: AdmissionPolicy | RunEnded, at: int) -> OutputRecord:
        return OutputRecord("candidates", replay.candidates_at, run.encode(), event, None, at)

    write(control(policy, 0))
    reported_at = began
    for event in source.events():
        if request.with_steps and event.source == STEPS and not isinstance(event.record, Tick):
            key, time_ms = event.key, event.time
            write(OutputRecord("steps", event.partition, key, event.record, None, time_ms))
        write(*replay.take(event))
        if time.monotonic() - reported_at > PROGRESS_S:
            reported_at = time.monotonic()
            logger().info("replaying", steps=replay.stats.steps, until_ms=event.time)
    write(*replay.tick(source.end))
    if not request.stay_open:
        reason = f"the end of replay {request.name}"
        ended = RunEnded(run_id=run, reason=reason, created_at=now_micros())
        write(control(ended, source.end))
    writer.close()
    seconds = time.monotonic() - began
    return {
        **replay.stats.as_dict(),
        "open": replay.open,
        "waiting": replay.waiting,
        "unreadable": source.unreadable,
        "assemble_s": round(seconds, 3),
        "steps_per_s": round(replay.stats.steps / seconds, 1),
    }


def _admit(target: Settings, cluster: Cluster) -> dict[str, Any]:
    """Run admission to the end of the candidates; return the outcome of each channel."""
    began, topics, run = time.monotonic(), target.kafka.topics, target.run_id
    channels = target.admit.channels
    create_topics(cluster, target, [topics.ready_batches_spec(run, c) for c in channels])
    decoder = Decoder(cluster, topics.schemas)
    admitters = [ChannelAdmitter(target, channel, cluster, decoder) for channel in channels]
    for admitter in admitters:
        admitter.open()
    for admitter in admitters:
        end = admitter.end
        while admitter.position < end:
            admitter.step(0.5)
    for admitter in admitters:
        admitter.close()
    outcomes = {}
    for channel in channels:
        topic = topics.ready_batches(run, channel)
        outcome = Outcome().add(journal(cluster, decoder, topic)).as_dict()
        outcomes[channel] = {"topic": topic, "topic_id": cluster.topic_id(topic), **outcome}
    return {"channels": outcomes, "admit_s": round(time.monotonic() - began, 3)}


def list_replays(settings: Settings) -> list[dict[str, Any]]:
    """Return the name, request, plan and result of each replay; the result is None until done."""
    files = sorted((settings.data_dir / "replays").glob("*/replay.json"))
    return [{"name": f.parent.name, **json.loads(f.read_text())} for f in files]


def delete_replay(settings: Settings, name: str) -> int:
    """Delete a replay's topics and plan; return the number of deleted topics.

    Its directory stays if it contains other files.

    Raises:
        SettingsError: There is no such replay.
    """
    replay_settings(settings, name, settings.run_id, settings.kafka.partitions)  # or an error
    prefix = _target_prefix(settings, cluster_of(settings), name)
    if prefix.read() is None:
        raise SettingsError(f"there is no replay {name} in {settings.data_dir / 'replays'}")
    with prefix.held():
        return prefix.delete()
