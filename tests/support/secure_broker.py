"""One real Kafka node with TLS, SCRAM users and ACLs."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from support.ports import free_port

from clawstream.runtime.broker import node_config
from clawstream.runtime.broker.data_dir import new_cluster_id
from clawstream.runtime.broker.jars import ensure_jars, find_java
from clawstream.runtime.broker.jvm import Jvm
from clawstream.runtime.topics.access import Acl

JAAS = "org.apache.kafka.common.security"
PASSWORD = "a-secret"
MECHANISM = "SCRAM-SHA-256"
OPERATIONS = {o.name.title().replace("_", ""): o for o in AclOperation}
TYPES = {
    "topic": ResourceType.TOPIC,
    "group": ResourceType.GROUP,
    "transactional-id": ResourceType.TRANSACTIONAL_ID,
}


@dataclass
class SecureBroker:
    """A broker whose only listener for clients is SASL_SSL. `admin` may do everything.

    Every user has the password `PASSWORD`.
    """

    port: int
    ca_file: Path
    admin: AdminClient

    def kafka(self, user: str, **security: Any) -> dict[str, Any]:
        """Return the settings `kafka` of a user. security: Settings that differ."""
        login = {
            "protocol": "sasl_ssl", "mechanism": MECHANISM, "user": user, "password": PASSWORD,
            "ca_file": self.ca_file,
        }  # fmt: skip
        return {"bootstrap_servers": f"127.0.0.1:{self.port}", "security": login | security}

    def add_user(self, name: str, acls: Iterable[Acl]) -> None:
        """Create a user with permissions."""
        login = UserScramCredentialUpsertion(
            name, ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096), PASSWORD.encode()
        )
        for future in self.admin.alter_user_scram_credentials([login]).values():
            future.result()
        bindings = [
            AclBinding(
                TYPES[acl.resource],
                acl.name,
                ResourcePatternType.PREFIXED if acl.prefixed else ResourcePatternType.LITERAL,
                f"User:{name}",
                "*",
                OPERATIONS[operation],
                AclPermissionType.ALLOW,
            )
            for acl in acls
            for operation in acl.operations
        ]
        for future in self.admin.create_acls(bindings).values():
            future.result()


@contextmanager
def secure_broker(directory: Path) -> Iterator[SecureBroker]:
    """Run the broker."""
    port, java, jars = free_port(nodes=2), find_java(None), ensure_jars(None)
    certificate = make_certificate(java.executable, directory, "broker")
    plan = node_config.plan_node(directory, port)
    plan.directory.mkdir()
    properties = server_properties(port, directory / "broker.p12")
    rendered = node_config.render_server_properties(plan).splitlines()
    kept = [line for line in rendered if line.split("=")[0] not in properties]
    plan.properties.write_text(
        "\n".join(kept) + "\n" + node_config.render_properties(properties), encoding="ascii"
    )
    plan.log4j2.write_text(node_config.render_log4j2(plan.log))
    users = [f"--add-scram={MECHANISM}=[name={u},password={PASSWORD}]" for u in ("broker", "admin")]
    subprocess.run(
        [*node_config.format_command(java, jars, plan.properties, new_cluster_id()), *users],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    command = node_config.server_command(java, jars, plan, 300)
    jvm = Jvm(command, plan.output, parent_death_signal=signal.SIGKILL)
    try:
        admin = AdminClient(admin_options(port, certificate))
        await_login(admin, jvm, plan.log)
        yield SecureBroker(port, certificate, admin)
    finally:
        jvm.end(0.0)


def server_properties(port: int, keystore: Path) -> Mapping[str, object]:
    """Return what differs from the embedded broker: the listeners, logins and the authorizer."""
    listeners = f"SASL_SSL://127.0.0.1:{port},INTERNAL://127.0.0.1:{port + 10}"
    own = f'required username="broker" password="{PASSWORD}"'
    return {
        "listeners": f"{listeners},CONTROLLER://127.0.0.1:{port + 1}",
        "advertised.listeners": listeners,
        "listener.security.protocol.map": "CONTROLLER:SASL_PLAINTEXT,INTERNAL:SASL_PLAINTEXT,"
        "SASL_SSL:SASL_SSL",
        "inter.broker.listener.name": "INTERNAL",
        "sasl.enabled.mechanisms": MECHANISM,
        "sasl.mechanism.inter.broker.protocol": MECHANISM,
        "sasl.mechanism.controller.protocol": "PLAIN",  # SCRAM users are in the controller's log
        "listener.name.sasl_ssl.scram-sha-256.sasl.jaas.config": f"{JAAS}.scram.ScramLoginModule "
        "required;",
        "listener.name.internal.scram-sha-256.sasl.jaas.config": f"{JAAS}.scram.ScramLoginModule "
        f"{own};",
        "listener.name.controller.sasl.enabled.mechanisms": "PLAIN",
        "listener.name.controller.plain.sasl.jaas.config": f"{JAAS}.plain.PlainLoginModule {own} "
        f'user_broker="{PASSWORD}";',
        "ssl.keystore.type": "PKCS12",
        "ssl.keystore.location": keystore,
        "ssl.keystore.password": PASSWORD,
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:broker;User:admin",
    }


def make_certificate(java: str, directory: Path, name: str) -> Path:
    """Make a self-signed certificate and its key in `<name>.p12`; return the certificate's PEM."""
    keytool = Path(java).with_name("keytool")
    store = [f"-keystore={directory / name}.p12", f"-storepass={PASSWORD}", f"-alias={name}"]
    words = [word for option in store for word in option.split("=", 1)]
    key = ["-genkeypair", "-keyalg", "EC", "-dname", "CN=localhost", "-validity", "2"]
    extensions = ["-ext", "san=ip:127.0.0.1,dns:localhost", "-ext", "bc=ca:true"]
    subprocess.run([keytool, *key, *extensions, *words], check=True, capture_output=True)
    pem = subprocess.run(
        [keytool, "-exportcert", "-rfc", *words], check=True, capture_output=True
    ).stdout
    path = directory / f"{name}.pem"
    path.write_bytes(pem)
    return path


def admin_options(port: int, ca_file: Path) -> dict[str, Any]:
    """Return librdkafka's options of the super user."""
    return {
        "bootstrap.servers": f"127.0.0.1:{port}", "security.protocol": "SASL_SSL",
        "ssl.ca.location": str(ca_file), "sasl.mechanism": MECHANISM, "sasl.username": "admin",
        "sasl.password": PASSWORD, "log_level": 0,
    }  # fmt: skip


def await_login(admin: AdminClient, jvm: Jvm, log: Path) -> None:
    """Wait until the broker serves the super user."""
    while True:
        try:
            admin.list_topics(timeout=1)
            return
        except KafkaException:
            assert jvm.exit_code is None, log.read_text()
            time.sleep(0.05)
