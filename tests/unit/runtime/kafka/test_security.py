"""Test how `kafka.security` becomes the options of the clients, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka import KafkaError as Code

from clawstream.runtime.exit_codes import EXIT_SETTINGS, exit_code
from clawstream.runtime.kafka.errors import Denied, translated
from clawstream.runtime.kafka.security import client_options, ssl_context
from clawstream.runtime.process.config import load
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import KafkaSettings

LOGIN = ["kafka.bootstrap_servers='a:1'", "kafka.security.user=me"]


def kafka(*words: str) -> KafkaSettings:
    return load(None, [*LOGIN[:1], *words], {}).kafka


def test_a_login_with_a_password_file(tmp_path: Path) -> None:
    password, ca = tmp_path / "password", tmp_path / "ca.pem"
    password.write_text("p: #1 \n")
    ca.touch()
    options = client_options(
        kafka(
            *LOGIN, "kafka.security.protocol=sasl_ssl", f"kafka.security.password_file={password}",
            f"kafka.security.ca_file={ca}", "kafka.client_options={client.rack: a}",
        )
    )  # fmt: skip
    assert options == {
        "client.rack": "a", "security.protocol": "SASL_SSL", "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "me", "sasl.password": "p: #1 ", "ssl.ca.location": str(ca),
    }  # fmt: skip


def test_a_password_of_the_environment_is_not_shown() -> None:
    environ = {"CLAWSTREAM__KAFKA__SECURITY__PASSWORD": "hunter2"}
    settings = load(None, [*LOGIN, "kafka.security.protocol=sasl_plaintext"], environ)
    assert client_options(settings.kafka)["sasl.password"] == "hunter2"
    assert "hunter2" not in repr(settings) + str(settings)


def test_a_plain_connection_is_the_default() -> None:
    assert client_options(kafka()) == {"security.protocol": "PLAINTEXT"}
    assert ssl_context(kafka().security) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["kafka.security.protocol=sasl_ssl"], "needs user"),
        (["kafka.security.user=me"], "has no login"),
        (["kafka.security.ca_file=/ca"], "has no TLS"),
        (["kafka.security={protocol: ssl, key_file: /key}"], "belong together"),
        (
            ["kafka.security={protocol: sasl_ssl, user: u, password: p, password_file: /p}"],
            "exclude each other",
        ),
        (["kafka.client_options={security.protocol: SSL}"], "set kafka.security"),
        (
            ["kafka.security.protocol=ssl", "kafka.client_options={compression.type: none}"],
            "always lz4",
        ),
        (["kafka.security.protocol=ssl", "kafka.bootstrap_servers=null"], "the embedded broker"),
    ],
)
def test_settings_that_cannot_work_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        kafka(*words)


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        ([*LOGIN, "kafka.security.protocol=sasl_ssl"], "kafka.security.password"),
        (
            [*LOGIN, "kafka.security={protocol: sasl_ssl, user: u, password_file: /none}"],
            "kafka.security.password_file",
        ),
        (["kafka.security={protocol: ssl, ca_file: /none}"], "kafka.security.ca_file"),
    ],
)
def test_a_missing_password_or_file_is_named(words: list[str], setting: str) -> None:
    with pytest.raises(SettingsError, match=setting):
        client_options(kafka(*words))


def test_a_file_that_is_no_certificate_is_named(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    security = kafka(f"kafka.security={{protocol: ssl, ca_file: '{tmp_path / 'ca.pem'}'}}").security
    with pytest.raises(SettingsError, match=r"kafka\.security: ca_file"):
        ssl_context(security)


@pytest.mark.parametrize(
    "code",
    [
        Code.TOPIC_AUTHORIZATION_FAILED,
        Code.GROUP_AUTHORIZATION_FAILED,
        Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        Code.SASL_AUTHENTICATION_FAILED,
    ],
)
def test_a_refusal_ends_a_process_as_wrong_settings_do(code: int) -> None:
    from confluent_kafka import KafkaException

    error = translated(KafkaException(Code(code)))
    assert isinstance(error, Denied) and exit_code(error) == EXIT_SETTINGS
    assert "clawstream topics acls" in str(error)
