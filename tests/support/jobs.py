"""Stream jobs as real processes on a real Kafka: an installation, its workers and outputs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
from support.processes import ROOT as ROOT
from support.processes import Processes

from clawstream.runtime.kafka import Cluster, Record
from clawstream.runtime.process.config import overrides_of
from clawstream.runtime.topics.records import create_topics
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.ids import new_call_id, new_event_id
from clawstream.schemas.records import Assessment, Candidate, Curation, Reward, SessionEvent, Step
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import pack_ids, pack_logprobs

RUN = (
    "import sys; from clawstream.runtime.process.config import load; "
    "from clawstream.stream_jobs.{}.main import main; "
    "main(load(overrides=sys.argv[1:]))"
)
Eventually = Callable[..., Any]


def step(key: str, prompt: list[int], response: list[int], **more: Any) -> Step:
    call = new_call_id(key)
    return Step(
        step_id=f"{call}.0", run_id="run", trajectory_key=key, call_id=call, choice_index=0,
        protocol="openai.chat", model="policy", status="ok", streamed=False, request_json=b"{}",
        response_json=b'{"content":"x"}', prompt_token_ids=pack_ids(prompt),
        response_token_ids=pack_ids(response),
        response_logprobs=pack_logprobs([-0.5] * len(response)), version_first="run/2.0",
        version_last="run/2.0", gateway_id="g", received_at=0, finished_at=0, **more,
    )  # fmt: skip


def session(key: str, kind: Any, **more: Any) -> SessionEvent:
    return SessionEvent(
        event_id=new_event_id(), run_id="run", trajectory_key=key, kind=kind, created_at=0, **more
    )


def reward(key: str, value: float, **more: Any) -> Reward:
    given = {"source": "env", "name": "score", "function_version": "1", "reward_revision": 0}
    return Reward(
        event_id=new_event_id(), run_id="run", trajectory_key=key, value=value, created_at=0,
        **given | more,
    )  # fmt: skip


@dataclass
class Jobs:
    """An installation with its topics, and the workers that a test starts."""

    settings: Settings
    cluster: Cluster
    processes: Processes
    codec: Codec = field(default_factory=Codec)

    def __post_init__(self) -> None:
        create_topics(self.cluster, self.settings)
        self.topics = self.settings.kafka.topics
        self.producer = self.cluster.producer()

    @property
    def workers(self) -> list[subprocess.Popen[bytes]]:
        """The started workers, in order."""
        return self.processes.started

    def start(
        self, worker: str = "0", job: str = "assemble", **jobs: Any
    ) -> subprocess.Popen[bytes]:
        tuned = self.settings.model_copy(
            update={"jobs": self.settings.jobs.model_copy(update={"worker_id": worker, **jobs})}
        )
        return self.processes.start(
            f"{job}-{worker}", [sys.executable, "-c", RUN.format(job), *overrides_of(tuned)]
        )

    def put(self, *events: Any, key: bytes | None = None) -> None:
        for event in events:
            topic = (
                self.topics.rewards
                if isinstance(event, Reward | Curation | Assessment)
                else self.topics.steps
            )
            self.producer.put(topic, key or event.trajectory_key.encode(), self.codec.encode(event))

    def records(self, topic: str, *kinds: type) -> list[tuple[Record, Any]]:
        found = [
            (r, self.codec.decode(r.value))
            for p in range(self.cluster.topics(topic)[topic])
            for r in self.cluster.read_all(topic, p)
        ]
        return [(r, e) for r, e in found if isinstance(e, kinds)]

    def candidates(self) -> dict[str, Candidate]:
        """Return the last candidate of each trajectory."""
        out: dict[str, Candidate] = {}
        for _, c in self.records(self.topics.candidates, Candidate):
            if c.trajectory_id not in out or c.revision > out[c.trajectory_id].revision:
                out[c.trajectory_id] = c
        return out

    def conversation(self, key: str, turns: int = 3) -> list[Any]:
        """Return a whole trajectory: opened, steps, completed."""
        events: list[Any] = [
            session(
                key, "opened", metadata_json=b'{"gold":"x"}', group_id=f"g-{key[0]}", group_size=4
            )
        ]
        ids = [1, 2, len(key)]
        for turn in range(turns):
            asked = orjson.dumps({"messages": [{"role": "user", "content": f"{turn}?"}]})
            events.append(replace(step(key, ids, [10 + turn, 11]), request_json=asked))
            ids = [*ids, 10 + turn, 11, 7, 7]
        return [*events, session(key, "completed")]


@contextmanager
def running(settings: Settings, cluster: Cluster, logs: Path, **jobs: Any) -> Iterator[Jobs]:
    """Run an installation; its workers are killed at the end."""
    tuned = settings.model_copy(
        update={"jobs": settings.jobs.model_copy(update={"tick_interval_s": 0.3, **jobs})}
    )
    with Processes(logs) as processes:
        made = Jobs(tuned, cluster, processes)
        try:
            yield made
        finally:
            made.producer.close()
