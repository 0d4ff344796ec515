"""An agent and a gateway in one, for tests that need no real ones.

The feed writes whole trajectories to Kafka and reads the results.
"""

from __future__ import annotations

from typing import Any

from support.lake import column

from clawstream.runtime.kafka import Cluster, Record
from clawstream.runtime.topics.records import Decoder, create_topics, decode_all
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.ids import new_call_id, new_event_id
from clawstream.schemas.records import (
    DeadLetter,
    ReadyBatch,
    Reward,
    SessionEvent,
    Step,
    WeightVersion,
)
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import pack_ids, pack_logprobs

GROUP_SIZE = 2
POLICY = {"group_size": GROUP_SIZE, "batch_groups": 1, "required_rewards": ["env"]}
"""A policy that makes a batch of each group that the feed writes."""


def session(run: str, key: str, kind: Any, **more: Any) -> SessionEvent:
    return SessionEvent(
        event_id=new_event_id(), run_id=run, trajectory_key=key, kind=kind, created_at=0, **more
    )


def step(run: str, key: str, **more: Any) -> Step:
    """Return a trainable step, sampled by version 0.0 of its run."""
    call = new_call_id(key)
    return Step(
        step_id=f"{call}.0", run_id=run, trajectory_key=key, call_id=call, choice_index=0,
        protocol="openai.chat", model="policy", status="ok", streamed=False, request_json=b"{}",
        response_json=b'{"content":"x"}', prompt_token_ids=pack_ids([2, 5]),
        response_token_ids=pack_ids([9, 3]), response_logprobs=pack_logprobs([-3.0, -3.0]),
        version_first=f"{run}/0.0", version_last=f"{run}/0.0", gateway_id="g", received_at=0,
        finished_at=0, **more,
    )  # fmt: skip


def reward(run: str, key: str, value: float, **more: Any) -> Reward:
    return Reward(
        event_id=new_event_id(), run_id=run, trajectory_key=key, source="env", name="score",
        function_version="1", value=value, reward_revision=0, created_at=0, **more,
    )  # fmt: skip


class Feed:
    """Write to one installation and read its topics and tables."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.run, self.topics = settings, settings.run_id, settings.kafka.topics
        self.cluster, self.codec = Cluster(settings.bootstrap_servers), Codec()
        create_topics(self.cluster, settings)
        self.producer = self.cluster.producer()
        self.steps: list[str] = []
        """Ids of all steps written."""

    def put(self, *events: Any) -> None:
        for event in events:
            topic = self.topics.rewards if isinstance(event, Reward) else self.topics.steps
            self.producer.put(topic, event.trajectory_key.encode(), self.codec.encode(event))
            if isinstance(event, Step):
                self.steps.append(event.step_id)
        self.producer.flush()

    def group(self, name: str) -> None:
        """Write the whole trajectories of one group, with rewards that differ."""
        for member in range(GROUP_SIZE):
            key = f"{name}-{member}"
            opened = session(self.run, key, "opened", group_id=name, group_size=GROUP_SIZE)
            done = session(self.run, key, "completed")
            self.put(opened, step(self.run, key), done, reward(self.run, key, float(member)))

    def records(self, topic: str) -> list[Record]:
        partitions = range(self.cluster.topics(topic).get(topic, 0))
        return [r for p in partitions for r in self.cluster.read_all(topic, p)]

    def events(self, topic: str, kind: type) -> list[Any]:
        """Return the records of one kind on a topic; other kinds are skipped."""
        found = decode_all(
            Decoder(self.cluster, self.topics.schemas), self.records(topic), lambda *_: None
        )
        return [e for _, e in found if isinstance(e, kind)]

    def batches(self) -> list[ReadyBatch]:
        return self.events(self.topics.ready_batches(self.run, "train"), ReadyBatch)

    def groups(self) -> list[str]:
        """Return the ids of the admitted groups, in order."""
        return [g.group_id for b in self.batches() for g in b.groups]

    def versions(self) -> list[WeightVersion]:
        return self.events(self.topics.weights, WeightVersion)

    def ids(self) -> list[str]:
        """Return the versions on the log, without the run."""
        return [v.version_id.partition("/")[2] for v in self.versions()]

    def dead(self) -> list[DeadLetter]:
        return self.events(self.topics.dead_letters, DeadLetter)

    def column(self, table: str, name: str) -> list[Any]:
        """Return the current content of a column of the lake."""
        return column(self.settings, table, name)

    def close(self) -> None:
        self.producer.close()
