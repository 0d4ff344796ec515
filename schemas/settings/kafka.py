"""The Kafka cluster and the embedded broker."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from schemas.settings.base import Count, Port, Positive, Section
from schemas.topics import Topics


class KafkaSettings(Section):
    """Which cluster, and how its topics are made."""

    bootstrap_servers: str | None = Field(
        None, description="another cluster instead of the embedded broker"
    )
    client_options: Mapping[str, str] = Field(
        {}, description="librdkafka options, e.g. security.protocol, sasl.*"
    )
    topic_prefix: str = Field(
        "claw", pattern=r"^[a-z0-9_-]{1,32}$", description="several installations on one cluster"
    )
    partitions: Count = Field(12, description="P of the keyed topics; fixed once they exist")
    replication_factor: Count | None = Field(
        None,
        description="copies of each topic; default 3 with three or more embedded nodes, else 1",
    )
    min_insync_replicas: Count | None = Field(
        None, description="copies an acknowledgement waits for; default replication_factor - 1"
    )
    steps_retention_s: Positive = Field(
        30 * 86400.0, description="how long raw steps stay replayable from Kafka"
    )

    @property
    def topics(self) -> Topics:
        return Topics(self.topic_prefix)


class BrokerSettings(Section):
    """The embedded Apache Kafka; unused when kafka.bootstrap_servers names another cluster."""

    data_dir: Path | None = Field(
        None, description="a faster or larger disk; default <data_dir>/broker"
    )
    port: Port = Field(19092, description="the port is taken")
    advertised_host: str = Field(
        "127.0.0.1",
        description="the name by which clients on other machines or in other containers reach it",
    )
    nodes: Literal[1, 3, 5] = Field(1, description="3: try replication on one machine")
    heap_mb: Annotated[int, Field(ge=200)] = Field(
        300, description="many partitions or large records"
    )
    java: str | None = Field(
        None, description="a Java >= 17 of your own instead of the packaged one"
    )
    jars_dir: Path | None = Field(
        None, description="shared cache of Kafka's jars; default ~/.cache/clawstream"
    )
