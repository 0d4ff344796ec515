"""The Kafka cluster and the embedded broker."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from clawstream.schemas.settings.base import Count, Port, Positive, Secret, Section
from clawstream.schemas.topics import Topics

OWN_OPTIONS = ("security.", "sasl.", "ssl.")
"""Beginnings of the librdkafka options that `KafkaSecurity` sets."""


class KafkaSecurity(Section):
    """TLS and login of every Kafka client."""

    protocol: Literal["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"] = Field(
        "plaintext", description="what the brokers' listener asks for; ssl: TLS, sasl: a login"
    )
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = Field(
        "SCRAM-SHA-512", description="how the login proves its password"
    )
    user: str | None = Field(None, description="the login's name")
    password: Annotated[str | None, Secret()] = Field(
        None,
        repr=False,
        description="the login's password, best as the environment variable "
        "`CLAWSTREAM__KAFKA__SECURITY__PASSWORD`, in YAML quotes",
    )
    password_file: Path | None = Field(
        None, description="a file with nothing but the password, read at each start"
    )
    ca_file: Path | None = Field(
        None, description="PEM of the authority of the brokers' certificates; default the system's"
    )
    certificate_file: Path | None = Field(
        None, description="PEM of the client's certificate, for brokers that ask for one"
    )
    key_file: Path | None = Field(None, description="PEM of its private key, not encrypted")

    @property
    def uses_tls(self) -> bool:
        return self.protocol.endswith("ssl")

    @property
    def uses_login(self) -> bool:
        return self.protocol.startswith("sasl")

    @model_validator(mode="after")
    def _consistent(self) -> KafkaSecurity:
        login = (self.user, self.password, self.password_file)
        files = (self.ca_file, self.certificate_file, self.key_file)
        if self.uses_login and self.user is None:
            raise ValueError(f"protocol {self.protocol} needs user")
        if not self.uses_login and login != (None, None, None):
            raise ValueError(
                f"protocol {self.protocol} has no login: set sasl_ssl, or neither user nor password"
            )
        if self.password is not None and self.password_file is not None:
            raise ValueError("password and password_file exclude each other")
        if not self.uses_tls and files != (None, None, None):
            raise ValueError(f"protocol {self.protocol} has no TLS: set ssl or sasl_ssl")
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file belong together")
        return self


class KafkaSettings(Section):
    """Which cluster, and how its topics are made."""

    bootstrap_servers: str | None = Field(
        None, description="another cluster instead of the embedded broker"
    )
    security: KafkaSecurity = KafkaSecurity()
    client_options: Annotated[Mapping[str, str], Secret("options")] = Field(
        {}, description="further librdkafka options, e.g. client.rack; none of TLS and login"
    )
    topic_prefix: str = Field(
        "claw", pattern=r"^[a-z0-9_-]{1,32}$", description="several installations on one cluster"
    )
    partitions: Count = Field(12, description="P of the keyed topics; fixed once they exist")
    replication_factor: Count | None = Field(
        None,
        description="copies of each topic; default 3 with three or more broker.hosts, else 1",
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

    @model_validator(mode="after")
    def _consistent(self) -> KafkaSettings:
        options = self.client_options
        if own := sorted(name for name in options if name.startswith(OWN_OPTIONS)):
            raise ValueError(
                f"client_options names {', '.join(own)}: set kafka.security, which holds for the "
                "stream jobs' consumers too"
            )
        if self.security.protocol != "plaintext" and self.bootstrap_servers is None:
            raise ValueError(
                "security is for the cluster of bootstrap_servers; the embedded broker has no TLS "
                "and no login"
            )
        if self.security.uses_tls and options.get("compression.type", "lz4") != "lz4":
            raise ValueError(
                "client_options sets compression.type: with TLS it is always lz4, because "
                "encryption costs more than compression"
            )
        return self


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
    hosts: tuple[str, ...] = Field(
        (),
        description="a node on each of 1, 3 or 5 machines or containers: the advertised_host of "
        "each, in the same order everywhere",
    )
    heap_mb: Annotated[int, Field(ge=200)] = Field(
        300, description="many partitions or large records"
    )
    java: str | None = Field(
        None, description="a Java >= 17 of your own instead of the packaged one"
    )
    jars_dir: Path | None = Field(
        None, description="shared cache of Kafka's jars; default ~/.cache/clawstream"
    )

    @property
    def cluster_size(self) -> int:
        """Number of nodes, on all machines."""
        return len(self.hosts) or 1

    @model_validator(mode="after")
    def _consistent(self) -> BrokerSettings:
        if len(self.hosts) not in (0, 1, 3, 5) or len({*self.hosts}) != len(self.hosts):
            raise ValueError("hosts names 1, 3 or 5 different hosts")
        return self
