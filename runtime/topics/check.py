"""Topics that are there already, held against how they would be made: what the jobs rely on is refused before it can do harm.

Without the broker's time a single record from a clock that is ahead closes everything, for good. On a topic of one partition nobody
reads a second one, and inputs of different numbers of partitions can't be joined. What a broker removes by its default of seven days is
gone without a word: rewards and candidates of a run that lives, decisions, so that they are made again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from runtime.kafka import Cluster
from runtime.logs import logger
from schemas.errors import SettingsError
from schemas.settings import Settings
from schemas.topics import Topics, TopicSpec

TIMES = "message.timestamp.type"
PARTITIONS = "partitions"
KEPT_MS = "retention.ms"
FOREVER = -1
"""As a retention, of time or bytes."""
ENDLESS = {"retention.ms": 100 * 365 * 86_400_000, "retention.bytes": 2**50}
"""A hundred years, a petabyte of one partition: as good as for ever, which some say with the largest number there is."""
EXACT = (TIMES, "cleanup.policy")
AT_LEAST = ("max.message.bytes", KEPT_MS, "retention.bytes")


@dataclass(frozen=True, slots=True)
class TopicMismatch:
    """One setting of one topic that is not as it must be."""

    topic: str
    setting: str
    found: str
    wanted: str


def check_topics(
    cluster: Cluster, settings: Settings, specs: Iterable[TopicSpec], there: Mapping[str, int]
) -> None:
    """Raises SettingsError for topics that can't be worked on; it names each, what was found and what to do.

    there: partitions of the topics that exist. Topics whose configuration may not be described are told of and let be.
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
    settings: Settings, specs: Iterable[TopicSpec], there: Mapping[str, int], configs: Mapping[str, Mapping[str, str]]
) -> Iterator[TopicMismatch]:  # fmt: skip
    """What does not fit. Pure. specs: of topics that exist. configs: as far as they are known.

    The four keyed topics have as many partitions as `steps` has, whatever the settings say today. The times of copies
    (`jobs.write_ticks=false`) are those of their source.
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
    """How many partitions a topic must have. there: partitions of the topics that exist."""
    return (
        there.get(topics.steps, spec.partitions) if spec.name in keyed(topics) else spec.partitions
    )


def keyed(topics: Topics) -> frozenset[str]:
    """Topics whose partitions belong together."""
    return frozenset((topics.steps, topics.rewards, topics.assembly, topics.trajectories))


def _less(setting: str, found: str, wanted: str) -> bool:
    """Whether a size or age is too small; -1 is without end."""
    if int(found) == FOREVER or int(found) >= ENDLESS.get(setting, int(found) + 1):
        return False
    return int(wanted) == FOREVER or int(found) < int(wanted)


def _told(found: list[TopicMismatch], servers: str) -> Iterator[str]:
    """One line for each wrong setting, then how to mend them."""
    for m in found:
        more = " or more" if m.setting in AT_LEAST and int(m.wanted) != FOREVER else ""
        yield f"topic {m.topic}: {m.setting} is {m.found}, must be {m.wanted}{more}"
    for topic in dict.fromkeys(m.topic for m in found if m.setting != PARTITIONS):
        wanted = ",".join(
            f"{m.setting}={m.wanted}" for m in found if m.topic == topic and m.setting != PARTITIONS
        )
        yield (
            f"mend it: kafka-configs --bootstrap-server {servers} --alter --entity-type topics --entity-name {topic} "
            f"--add-config {wanted}"
        )
    if any(m.setting == TIMES for m in found):
        yield "copies made by `clawstream topics copy` keep their times: jobs.write_ticks=false"
    if any(m.setting == KEPT_MS and int(m.wanted) != FOREVER for m in found):
        yield "or keep them no longer than that: kafka.steps_retention_s, at least twice jobs.trajectory_timeout_s"
    if any(m.setting == PARTITIONS for m in found):
        yield (
            "partitions can't be taken away: delete the topic while nothing needs what it has, it is made anew; "
            "`clawstream topics copy --to-prefix P --partitions N` moves steps and rewards to another number"
        )
