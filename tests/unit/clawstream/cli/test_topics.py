"""Commands of topics that need no broker."""

from __future__ import annotations

import pytest

from clawstream.cli.topics import topics_acls
from clawstream.schemas.settings import Settings
from clawstream.schemas.settings.kafka import KafkaSettings


def test_a_certificate_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    tls = KafkaSettings.model_validate(
        {"bootstrap_servers": "kafka:9093", "security": {"protocol": "ssl"}}
    )
    with pytest.raises(SystemExit):
        topics_acls("gateway", Settings(kafka=tls))
    assert "CN=gateway" in capsys.readouterr().err
    topics_acls("gateway", Settings(kafka=tls), "CN=g")
    assert "User:CN=g " in capsys.readouterr().out
