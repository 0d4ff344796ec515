"""Compare existing topics with their specification and refuse configurations that lose data.

Without broker timestamps, one record from a clock that is ahead closes every trajectory. Inputs
with different numbers of partitions cannot be joined. The broker's default retention of seven days
would silently delete rewards and candidates of a live run, and decisions, which would then be made
again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from clawstream.runtime.kafka import Cluster
from clawstream.runtime.logs import logger
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import Settings
from clawstream.schemas.topics import Topics, TopicSpec

TIMES = "message.timestamp.type"
PARTITIONS = "partitions"
KEPT_MS = "retention.ms"
FOREVER = -1
"""Unlimited retention, of time or bytes."""
ENDLESS = {"retention.ms": 100 * 365 * 86_400_000, "retention.bytes": 2**50}
"""A hundred years and a petabyte per partition count as unlimited; some tools set the maximum."""
EXACT = (TIMES, "cleanup.policy")
AT_LEAST = ("max.message.bytes", KEPT_MS, "retention.bytes")


@dataclass(frozen=True, slots=True)
class TopicMismatch:
    """One setting of a topic that differs from the required value."""

    topic: str
    setting: str
    found: str
    wanted: str


def check_topics(
    cluster: Cluster, settings: Settings, specs: Iterable[TopicSpec], there: Mapping[str, int]
) -> None:
    """Check the configuration of existing topics.

    Topics whose configuration may not be described are logged and skipped.

    Args:
        specs: The specification of each topic.
        there: Partition counts of existing topics.

    Raises:
        SettingsError: Names each unusable topic, the found and the required value, and the remedy.
    """
    mine = [spec for spec in specs if spec.name in there]
    configs = cluster.topic_configs([spec.name for spec in mine])
    if hidden := sorted(name for name, config in configs.items() if config is None):
        logger().warning(
            "topic_config_unknown",
            topics=hidden,
            action="allow DescribeConfigs on them; nobody checks their times",
        )
    found = list(
        find_mismatches(settings, mine, there, {n: c for n, c in configs.items() if c is not None})
    )
    if found:
        raise SettingsError("\n".join(_told(found, cluster.bootstrap_servers)))


def find_mismatches(
    settings: Settings,
    specs: Iterable[TopicSpec],
    there: Mapping[str, int],
    configs: Mapping[str, Mapping[str, str]],
) -> Iterator[TopicMismatch]:
    """Yield every mismatch between existing topics and their specification. Pure.

    The keyed topics must have as many partitions as `steps` has, whatever the settings say.
    Topics of a replay (`jobs.write_ticks=false`) keep the timestamps of their source.

    Args:
        specs: Of existing topics.
        configs: The known configurations.
    """
    topics = settings.kafka.topics
    for spec in specs:
        partitions = partitions_of(topics, spec, there)
        if there[spec.name] != partitions:
            yield TopicMismatch(spec.name, PARTITIONS, str(there[spec.name]), str(partitions))
        config = configs.get(spec.name, {})
        for setting in EXACT:
            found = config.get(setting, spec.config[setting])
            if found != spec.config[setting] and (setting != TIMES or settings.jobs.write_ticks):
                yield TopicMismatch(spec.name, setting, found, spec.config[setting])
        for setting in AT_LEAST:
            wanted = spec.config.get(setting)
            if wanted is not None and _less(setting, config.get(setting, wanted), wanted):
                yield TopicMismatch(spec.name, setting, config[setting], wanted)


def partitions_of(topics: Topics, spec: TopicSpec, there: Mapping[str, int]) -> int:
    """Return the required number of partitions. there: Partition counts of existing topics."""
    return (
        there.get(topics.steps, spec.partitions) if spec.name in keyed(topics) else spec.partitions
    )


def keyed(topics: Topics) -> frozenset[str]:
    """Return the topics that are partitioned alike, by trajectory key."""
    return frozenset(
        (
            topics.steps,
            topics.rewards,
            topics.assembly,
            topics.trajectories,
            topics.trained_tokens,
        )
    )


def _less(setting: str, found: str, wanted: str) -> bool:
    """Return whether a size or age is too small; -1 is unlimited."""
    if int(found) == FOREVER or int(found) >= ENDLESS.get(setting, int(found) + 1):
        return False
    return int(wanted) == FOREVER or int(found) < int(wanted)


def _told(found: list[TopicMismatch], servers: str) -> Iterator[str]:
    """Yield one line for each wrong setting, then the remedies."""
    for m in found:
        more = " or more" if m.setting in AT_LEAST and int(m.wanted) != FOREVER else ""
        yield f"topic {m.topic}: {m.setting} is {m.found}, must be {m.wanted}{more}"
    for topic in dict.fromkeys(m.topic for m in found if m.setting != PARTITIONS):
        wanted = ",".join(
            f"{m.setting}={m.wanted}" for m in found if m.topic == topic and m.setting != PARTITIONS
        )
        yield (
            f"mend it: kafka-configs --bootstrap-server {servers} --alter --entity-type topics "
            f"--entity-name {topic} "
            f"--add-config {wanted}"
        )
    if any(m.setting == TIMES for m in found):
        yield "topics of a replay keep their times: jobs.write_ticks=false"
    if any(m.setting == KEPT_MS and int(m.wanted) != FOREVER for m in found):
        yield (
            "or keep them no longer than that: kafka.steps_retention_s, at least twice "
            "jobs.trajectory_timeout_s"
        )
    if any(m.setting == PARTITIONS for m in found):
        yield (
            "partitions can't be taken away: delete the topic while nothing needs what it has, "
            "it is created again; for another number use another kafka.topic_prefix"
        )
