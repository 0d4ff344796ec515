"""The live tail of the inspector on a real Kafka."""

from __future__ import annotations

from threading import Event

import pytest

from inspector.live.feed import Follower
from runtime.kafka import Cluster, KafkaError
from schemas.settings import Settings


def test_topics_that_do_not_exist_yet_are_asked_for_again(
    settings: Settings, cluster: Cluster
) -> None:
    follower = Follower(cluster, settings)
    with pytest.raises(KafkaError, match=r"no topic .*steps yet"):
        follower(lambda *_: None, Event())
    assert not follower.is_connected()
