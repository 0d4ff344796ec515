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
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from clawstream.ops.replay.fold import OutputRecord, Replay, ReplaySource
from clawstream.ops.replay.report import Outcome, journal
from clawstream.ops.replay.topic_source import TopicReplaySource
from clawstream.ops.topics.copy import RecordFilter, Writer
from clawstream.ops.topics.target_prefix import TargetPrefix
from runtime.atomic_file import write_durably
from runtime.kafka import Cluster
from runtime.kafka.window import Window, window_of
from runtime.logs import logger
from runtime.process.remembered_settings import public, remember
from runtime.topics.records import Decoder, cluster_of, create_topics, now_micros
from schemas.codec.single_object import Codec
from schemas.errors import SettingsError
from schemas.ids import check_run_id
from schemas.records import AdmissionPolicy, RunEnded, Tick, Trajectory
from schemas.rule_spec import of_run
from schemas.settings import PolicySettings, Settings
from stream_jobs.admit.main import ChannelAdmitter
from stream_jobs.admit.policy import policy_of
from stream_jobs.admit.policy_log import PolicyLog
from stream_jobs.assemble.job import limits_of
from stream_jobs.assemble.model import STEPS
from stream_jobs.errors import PolicyRefused
from stream_jobs.reward.evaluate import RuleEvaluator

NAME = re.compile(r"[a-z0-9-]{1,25}")
PROGRESS_S = 10.0


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """What to replay.

    table_versions: Versions of the lake's tables, which are then the source. since_ms, until_ms:
    Log time. as_run: Another run id for the output. keep_rules: Use recorded answers of rules
    instead of asking them. with_steps: Copy the steps. stay_open: Do not end the run; undecided
    groups stay.
    """

    name: str
    table_versions: Mapping[str, int | None] | None = None
    since_ms: int | None = None
    until_ms: int | None = None
    as_run: str | None = None
    keep_rules: bool = False
    with_steps: bool = False
    stay_open: bool = False


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
    kafka = settings.kafka.model_copy(
        update={
            "topic_prefix": f"replay-{name}",
            "partitions": partitions,
            "bootstrap_servers": settings.bootstrap_servers,
            "replication_factor": factor,
            "min_insync_replicas": insync,
        }
    )
    # The functions of the run are those of the replay's run too: what its policy requires follows
    # from them.
    functions = {
        name: {**configured, run_id: of_run(configured, settings.run_id)}
        for name in ("reward_functions", "quality_functions")
        if (configured := getattr(settings.jobs, name))
    }
    trainer = settings.trainer.model_copy(update={"weights_dir": None, "checkpoint_dir": None})
    return settings.model_copy(
        update={
            "run_id": check_run_id(run_id),
            "data_dir": home_of(settings, name),
            "kafka": kafka,
            "trainer": trainer,
            "jobs": settings.jobs.model_copy(update={"write_ticks": False, **functions}),
            "lake": settings.lake.model_copy(update={"uri": None, "storage_options": {}}),
            "gateway": settings.gateway.model_copy(update={"blob_uri": settings.blob_uri}),
        }
    )


def run_replay(settings: Settings, request: ReplayRequest) -> dict[str, Any]:
    """Replay the run of the settings and return a report.

    A finished replay only reports again; a killed one starts over.

    Raises:
        SettingsError, LakeError, PrefixTaken, WindowGone, or a KafkaError.
    """
    cluster = cluster_of(settings)
    target = replay_settings(
        settings, request.name, request.as_run or settings.run_id, settings.kafka.partitions
    )
    prefix_files, topics = _target_prefix(settings, cluster, request.name), target.kafka.topics
    with closing(RuleEvaluator(settings)) as answers, prefix_files.held():
        begun = prefix_files.begin(
            _asked(settings, request), lambda: _plan(settings, cluster, request, answers)
        )
        if begun.result is not None:
            return {**begun.result, "was_done": True}
        target = replay_settings(settings, request.name, target.run_id, begun.plan["partitions"])
        prefix_files.make(
            target, (topics.steps, topics.rewards, topics.trajectories, topics.candidates)
        )
        keep_settings(target)
        source = _source(settings, cluster, request, begun.plan, answers)
        report = {"name": request.name, "prefix": topics.prefix, "run": target.run_id, **begun.plan}
        policy = replace(policy_of(target, 1, now_micros()), **_fields(begun.plan["policy"]))
        report |= _assemble(target, cluster, request, source, answers, settings.run_id, policy)
        if report["newest_attempt"] is not None:
            keep_settings(_with_ids_above(target, report["newest_attempt"]))
        report |= _admit(target, cluster)
        prefix_files.done(report)
    return {**report, "was_done": False}


def _with_ids_above(target: Settings, newest_attempt: int) -> Settings:
    """Choose a first attempt so that no new version id equals one that recorded tokens name."""
    first = max(target.trainer.first_attempt, newest_attempt + 1)
    return target.model_copy(
        update={"trainer": target.trainer.model_copy(update={"first_attempt": first})}
    )


def keep_settings(target: Settings) -> None:
    """Write the settings of a replay into its directory, without secrets."""
    tree, _ = public(target)
    write_durably(target.data_dir / "settings.yaml", json.dumps(tree).encode(), 0o600)
    remember(target)


def _asked(settings: Settings, request: ReplayRequest) -> dict[str, Any]:
    """All that the outcome depends on: another of it under the same name is a mistake."""
    jobs = settings.jobs.model_dump(
        mode="json",
        include={
            "trajectory_timeout_s",
            "closed_horizon_s",
            "closed_max",
            "orphan_after_s",
            "bucket_inactivity_s",
            "agent_inactivity_s",
            "reward_functions",
            "quality_functions",
            "train_truncated",
            "tick_interval_s",
        },
    )
    policy = settings.admit.policy.model_dump(mode="json")
    return {
        **asdict(request),
        "source": settings.kafka.topic_prefix,
        "run": settings.run_id,
        "lake": settings.lake_uri,
        "jobs": jobs,
        "policy": policy,
        "channels": list(settings.admit.channels),
    }


def _target_prefix(settings: Settings, cluster: Cluster, name: str) -> TargetPrefix:
    return TargetPrefix(cluster, f"replay-{name}", home_of(settings, name) / "replay.json")


def _plan(
    settings: Settings, cluster: Cluster, request: ReplayRequest, answers: RuleEvaluator
) -> dict[str, Any]:
    """Return what to read and the number of partitions, which is that of the source."""
    policy = {"policy": _recorded_policy(settings, cluster, request, answers)}
    if request.table_versions is not None:
        from clawstream.ops.replay.lake_source import partitions_of, snapshot_versions

        versions = snapshot_versions(settings, request.table_versions)
        return {
            "from": "lake",
            "versions": versions,
            "partitions": partitions_of(settings, versions),
            **policy,
        }
    topics = settings.kafka.topics
    windows = [
        window_of(cluster, t, request.since_ms, request.until_ms)
        for t in (topics.steps, topics.rewards)
    ]
    return {
        "from": "topics",
        "windows": [w.as_dict() for w in windows],
        "partitions": max(len(w.ranges) for w in windows),
        **policy,
    }


def _recorded_policy(
    settings: Settings, cluster: Cluster, request: ReplayRequest, answers: RuleEvaluator
) -> dict[str, Any]:
    """Return fields of the run's newest policy that the settings do not define.

    These are all fields if the settings have no policy. `required_rewards` and `require_assessment`
    also come from the recorded policy where recorded answers count, because the settings need not
    name the functions that gave them.
    """
    said, run = settings.admit.policy, settings.run_id
    names = set(PolicySettings.model_fields) if said == PolicySettings() else set[str]()
    names |= {"reward_deadline_ms", "group_deadline_ms", "val_deadline_ms"} if names else set()
    for name, is_set, is_asked in (
        ("required_rewards", said.required_rewards is not None, answers.has_reward_functions(run)),
        ("require_assessment", said.require_assessment is not None, answers.has_quality_rules(run)),
    ):
        if is_set or (is_asked and not request.keep_rules):
            names.discard(name)
        else:
            names.add(name)
    try:
        newest = PolicyLog(settings, cluster).newest
    except PolicyRefused:  # there is no such topic any more: the lake may have what it held
        return {}
    if newest is None:
        return {}
    # The trainer of the replay has sync_every from the settings, and would refuse another one.
    return {n: v for n, v in asdict(newest.policy).items() if n in names - {"sync_every"}}


def _fields(policy: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a policy, as they were before they became JSON."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in policy.items()
    }


def _source(
    settings: Settings,
    cluster: Cluster,
    request: ReplayRequest,
    plan: Mapping[str, Any],
    answers: RuleEvaluator,
) -> ReplaySource:
    run = settings.run_id
    record_filter = RecordFilter(
        run,
        request.as_run,
        request.keep_rules or not answers.has_reward_functions(run),
        request.keep_rules or not answers.has_quality_rules(run),
    )
    if plan["from"] == "lake":
        from clawstream.ops.replay.lake_source import LakeReplaySource, Span

        span = Span(request.since_ms, request.until_ms)
        return LakeReplaySource(settings, plan["versions"], plan["partitions"], span, record_filter)
    steps, rewards = map(Window.from_dict, plan["windows"])
    return TopicReplaySource(
        cluster, Decoder(cluster, settings.kafka.topics.schemas), steps, rewards, record_filter
    )


# -- assemble and reward


def _assemble(
    target: Settings,
    cluster: Cluster,
    request: ReplayRequest,
    source: ReplaySource,
    answers: RuleEvaluator,
    source_run: str,
    policy: AdmissionPolicy,
) -> dict[str, Any]:
    """Everything up to the candidates. source_run: whose rules are asked."""

    def rules(trajectory: Trajectory) -> list[Any]:
        # Not the clock: the same again must be the same bytes.
        return (
            []
            if request.keep_rules
            else answers.evaluate(trajectory, trajectory.closed_at * 1000, source_run)
        )

    began, topics, run = time.monotonic(), target.kafka.topics, target.run_id
    writer, limits = ReplayWriter(cluster, target), limits_of(target)
    if (
        request.table_versions is not None
    ):  # the lake has no ticks, so it does not tell a silence from an idle log
        limits = replace(limits, silent_after=None)
    replay = Replay(
        run,
        target.kafka.partitions,
        limits,
        writer.codec,
        rules,
        cluster.topic_id(topics.trajectories),
        target.jobs.cache_mb << 20,
        source.payload,
    )
    writer.write([OutputRecord("candidates", replay.candidates_at, run.encode(), policy, None, 0)])
    said_at = began
    for event in source.events():
        if request.with_steps and event.source == STEPS and not isinstance(event.record, Tick):
            writer.write(
                [OutputRecord("steps", event.partition, event.key, event.record, None, event.time)]
            )
        writer.write(replay.take(event))
        if time.monotonic() - said_at > PROGRESS_S:
            said_at = time.monotonic()
            logger().info("replaying", steps=replay.stats.steps, until_ms=event.time)
    writer.write(replay.tick(source.end))
    if not request.stay_open:
        ended = RunEnded(
            run_id=run, reason=f"the end of replay {request.name}", created_at=now_micros()
        )
        writer.write(
            [
                OutputRecord(
                    "candidates", replay.candidates_at, run.encode(), ended, None, source.end
                )
            ]
        )
    writer.close()
    stats, seconds = replay.stats, time.monotonic() - began
    return {
        **stats.as_dict(),
        "open": replay.open,
        "waiting": replay.waiting,
        "unreadable": source.unreadable,
        "assemble_s": round(seconds, 3),
        "steps_per_s": round(stats.steps / seconds, 1),
    }


class ReplayWriter:
    """Writes what the fold puts out."""

    def __init__(self, cluster: Cluster, target: Settings) -> None:
        self._writer = Writer(cluster)
        topics = target.kafka.topics
        self._names = {
            "steps": topics.steps,
            "rewards": topics.rewards,
            "trajectories": topics.trajectories,
            "candidates": topics.candidates,
        }
        self.codec = Codec()

    def write(self, outs: list[OutputRecord]) -> None:
        for out in outs:
            topic = self._names[out.topic]
            self._writer.put(
                topic, out.partition, out.key, self.codec.encode(out.event), out.time, out.headers
            )

    def close(self) -> None:
        """Raises CopyFailed when something lies elsewhere than the candidates say."""
        self._writer.close()


# -- admit


def _admit(target: Settings, cluster: Cluster) -> dict[str, Any]:
    """Admission to the end of the candidates, and what it said."""
    began, topics, channels = time.monotonic(), target.kafka.topics, target.admit.channels
    create_topics(cluster, target, [topics.ready_batches_spec(target.run_id, c) for c in channels])
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
    said = {c: _said(cluster, decoder, topics.ready_batches(target.run_id, c)) for c in channels}
    return {"channels": said, "admit_s": round(time.monotonic() - began, 3)}


def _said(cluster: Cluster, decoder: Decoder, topic: str) -> dict[str, Any]:
    """What a ready-batches topic holds."""
    return {
        "topic": topic,
        "topic_id": cluster.topic_id(topic),
        **Outcome().add(journal(cluster, decoder, topic)).as_dict(),
    }


# -- those that there are


def list_replays(settings: Settings) -> list[dict[str, Any]]:
    """Name, what was asked, and the result of each; None while it is not done."""
    files = sorted((settings.data_dir / "replays").glob("*/replay.json"))
    return [{"name": f.parent.name, **json.loads(f.read_text())} for f in files]


def delete_replay(settings: Settings, name: str) -> int:
    """Delete a replay's topics and plan; return the number of deleted topics.

    Its directory stays if it contains other files.
    """
    replay_settings(
        settings, name, settings.run_id, settings.kafka.partitions
    )  # or an error that says what is wrong
    prefix_files = _target_prefix(settings, cluster_of(settings), name)
    if prefix_files.read() is None:
        raise SettingsError(f"there is no replay {name} in {settings.data_dir / 'replays'}")
    with prefix_files.held():
        return prefix_files.delete()
