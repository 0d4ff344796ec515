"""TLS, login and permissions: the settings `kafka.security` as the options of each client.

`client_options` is for librdkafka; `ssl_context` and `password_of` are for Faust's driver. A client
that the brokers refuse tells it to its error callback alone, while its calls run into their
time-outs: `Refusals` keeps the reason for the error of the call.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Sequence

from confluent_kafka import KafkaError as Code
from confluent_kafka import TopicCollection
from confluent_kafka.admin import AdminClient

from clawstream.runtime.kafka.errors import Denied, translating
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import KafkaSecurity, KafkaSettings

REMEDIES = {
    Code._AUTHENTICATION: "Correct kafka.security.user, password (or password_file) and mechanism",
    Code._SSL: "Correct kafka.security.ca_file, which must hold the authority of the brokers' "
    "certificates, and the host names of kafka.bootstrap_servers, which these must name",
}
"""What to do when a connection is refused."""
LEAST_REFUSALS = 3
"""As many in one call: a broker that restarts may refuse one."""


def client_options(kafka: KafkaSettings) -> dict[str, str]:
    """Return the librdkafka options of every client.

    Args:
        kafka: The settings; a password file is read now.

    Raises:
        SettingsError: There is no password, or a file cannot be read.
    """
    security = kafka.security
    options = {**kafka.client_options, "security.protocol": security.protocol.upper()}
    if security.uses_login:
        options |= {
            "sasl.mechanism": security.mechanism,
            "sasl.username": security.user or "",
            "sasl.password": password_of(security),
        }
    files = {
        "ssl.ca.location": ("ca_file", security.ca_file),
        "ssl.certificate.location": ("certificate_file", security.certificate_file),
        "ssl.key.location": ("key_file", security.key_file),
    }
    for option, (setting, path) in files.items():
        if path is not None:
            if not path.is_file():
                raise SettingsError(f"setting kafka.security.{setting}: there is no file {path}")
            options[option] = str(path)
    return options


def password_of(security: KafkaSecurity) -> str:
    """Return the password of the login.

    Args:
        security: Settings whose protocol has a login.

    Raises:
        SettingsError: There is none, or its file cannot be read.
    """
    if security.password is not None:
        return security.password
    if security.password_file is None:
        raise SettingsError(
            f"setting kafka.security.password: protocol {security.protocol} needs one; set it or "
            "kafka.security.password_file"
        )
    try:
        return security.password_file.read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"setting kafka.security.password_file: {error}") from error


def ssl_context(security: KafkaSecurity) -> ssl.SSLContext | None:
    """Return the TLS context for clients in Python; None without TLS.

    Args:
        security: The settings; the certificates are read now.

    Raises:
        SettingsError: A file is no certificate or key.
    """
    if not security.uses_tls:
        return None
    try:
        context = ssl.create_default_context(cafile=security.ca_file)
        if security.certificate_file is not None:
            context.load_cert_chain(security.certificate_file, security.key_file)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(
            f"setting kafka.security: ca_file, certificate_file or key_file: {error}"
        ) from error
    return context


def allowed_operations(admin: AdminClient, topics: Sequence[str]) -> dict[str, frozenset[str]]:
    """Return topic to the operations that the brokers allow this client, in Kafka's names.

    Args:
        admin: A client of the cluster.
        topics: Existing topics that the client may describe.
    """
    if not topics:
        return {}
    asked = admin.describe_topics(TopicCollection(list(topics)), include_authorized_operations=True)
    with translating():
        return {
            name: frozenset(
                operation.name.title().replace("_", "")
                for operation in future.result().authorized_operations
            )
            for name, future in asked.items()
        }


class Refusals:
    """Connections that the brokers have refused to the clients of one cluster.

    `note` is the error callback of all of them; all other errors come with their call. It is called
    while a client is polled, by any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count, self._last, self._remedy = 0, "", ""

    def note(self, error: Code) -> None:
        """Count a refusal."""
        if (remedy := REMEDIES.get(error.code())) is not None:
            with self._lock:
                self._count += 1
                self._last, self._remedy = error.str(), remedy

    def count(self, admin: AdminClient) -> int:
        """Return the number of refusals so far, before a call of the client."""
        admin.poll(0)
        return self._count

    def check(self, admin: AdminClient, before: int) -> None:
        """Check after a failed call of the client why no broker has answered.

        Args:
            admin: The client.
            before: `count` before the call; calls of other threads may run beside it.

        Raises:
            Denied: They refused every time; the message says why and what to set.
        """
        admin.poll(0)
        if self._count - before >= LEAST_REFUSALS:
            raise Denied(f"Kafka refuses the connection: {self._last}. {self._remedy}")
