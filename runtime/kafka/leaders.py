"""Which topics have a leader for every partition. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from confluent_kafka.admin import TopicMetadata

from clawstream.runtime.kafka.errors import Unavailable


def is_led(topic: TopicMetadata) -> bool:
    """Return whether a topic can be read and written."""
    parts = topic.partitions
    return topic.error is None and bool(parts) and all(p.leader >= 0 for p in parts.values())


def all_led(listed: Mapping[str, TopicMetadata], prefix: str) -> dict[str, int]:
    """Return topic to number of partitions of the topics with a prefix.

    Raises:
        Unavailable: A topic has no leader: it is not deleted, only unavailable.
    """
    mine = {t: m for t, m in listed.items() if t.startswith(prefix)}
    if away := sorted(t for t, m in mine.items() if not is_led(m)):
        raise Unavailable(
            f"no broker leads all of {', '.join(away)}, which may be needed: try again when all "
            "brokers are up"
        )
    return {t: len(m.partitions) for t, m in mine.items()}
