"""`clawstream traces` on a real Kafka, with a receiver that decodes OTLP."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.otlp import Receiver, SpanKey, receiving
from support.ports import free_port
from support.processes import Processes
from support.traced_records import (
    RUN,
    batch,
    candidate,
    failed_call,
    member,
    refused,
    step,
    traceparent,
    version,
    worker,
)

from clawstream.ops.lag import backlogs, expected_groups
from clawstream.ops.tracing.calls import failed_call_spans, step_spans
from clawstream.ops.tracing.pipeline import (
    batch_spans,
    candidate_spans,
    loaded_spans,
    refused_spans,
    trained_spans,
    version_spans,
)
from clawstream.ops.tracing.spans import RecordPlace
from clawstream.runtime.kafka import Cluster
from clawstream.runtime.process.config import overrides_of
from clawstream.runtime.topics.records import create_topics
from clawstream.schemas import records
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.settings import Settings

Eventually = Callable[..., Any]
MEMBERS = 4
POISON = b"no record"


class Traced:
    """An installation whose records a test writes, and the process that exports their spans."""

    def __init__(self, settings: Settings, cluster: Cluster, processes: Processes) -> None:
        self.port = free_port()
        traces = settings.traces.model_copy(update={"endpoint": f"http://127.0.0.1:{self.port}"})
        self.settings = settings.model_copy(update={"traces": traces})
        self.cluster, self.topics, self.processes = cluster, settings.kafka.topics, processes
        self.group = f"{settings.kafka.topic_prefix}-traces"
        create_topics(cluster, settings)
        self.producer, self._codec = cluster.producer(), Codec()
        self.ready: str | None = None
        self.rounds = 0

    def start(self) -> Any:
        words = overrides_of(self.settings)
        return self.processes.start(
            "traces", [sys.executable, "-m", "clawstream", "traces", *words]
        )

    def put(self, topic: str, key: str, *events: Any) -> None:
        for event in events:
            self.producer.put(topic, key.encode(), self._codec.encode(event))

    def round(self) -> None:
        """Write what a batch and its version leave behind; every fourth client is not sampled."""
        topics, n = self.topics, self.rounds
        self.rounds += 1
        keys = [f"k{n}-{i}" for i in range(MEMBERS)]
        contexts = [traceparent(100 * n + i, 0 if i == 3 else 1) for i in range(MEMBERS)]
        for key, context in zip(keys, contexts, strict=True):
            calls = [step(key, f"C{call}", traceparent=context) for call in range(3)]
            self.put(topics.steps, key, *calls, failed_call(key, traceparent=context))
            closed = [candidate(key, revision, traceparent=context) for revision in range(2)]
            self.put(topics.candidates, RUN, *closed)
        self.producer.put(topics.steps, b"poison", POISON)
        self.producer.flush()
        spec = topics.ready_batches_spec(RUN, "train")
        if self.ready is None:
            self.cluster.create_topic(spec.name, spec.partitions, spec.config)
            self.ready = self.cluster.topic_id(spec.name)
        *admitted, turned_away = zip(keys, contexts, strict=True)
        self.put(spec.name, RUN, batch(n, *(member(*named) for named in admitted)))
        self.put(spec.name, RUN, refused(turned_away, admitted[0]))
        self.producer.flush()
        self.put(topics.weights, f"{RUN}/{n}.0", version(n, self.ready, n, n))
        self.put(topics.workers, "w0", *(worker(f"{RUN}/{n}.0", beat) for beat in range(3)))
        self.producer.flush()

    def expected(self) -> dict[SpanKey, str]:
        """Return the name of each span of what is on the log."""
        found: dict[SpanKey, str] = {}
        batches: list[records.ReadyBatch] = []
        names = [*self.topics_with_spans(), self.topics.weights]
        ids = self.cluster.topic_ids(names)
        for topic in names:
            for partition in range(self.cluster.topics(topic)[topic]):
                for record in self.cluster.read_all(topic, partition):
                    at = RecordPlace(
                        topic, ids[topic], partition, record.offset, record.timestamp_ms
                    )
                    for span in self._spans(record.value, at, batches):
                        found[span.id] = span.name
        return found

    def topics_with_spans(self) -> Iterator[str]:
        yield from (self.topics.steps, self.topics.candidates, self.topics.workers)
        yield self.topics.ready_batches(RUN, "train")

    def _spans(self, value: bytes, at: RecordPlace, batches: list[Any]) -> Iterator[Any]:
        match self._codec.decode(value) if value != POISON else None:
            case records.Step() as event:
                yield from step_spans(event, at, False)
            case records.FailedCall() as event:
                yield from failed_call_spans(event, False)
            case records.Candidate() as event:
                yield from candidate_spans(event, at, False)
            case records.ReadyBatch() as event:
                batches.append(event)
                yield from batch_spans(event, at, False)
            case records.Refused() as event:
                yield from refused_spans(event, at, False)
            case records.WorkerStatus() as event:
                yield from loaded_spans(event)
            case records.WeightVersion() as event:
                yield from version_spans(event)
                trained = [b for b in batches if b.batch_seq == event.first_batch_seq]
                yield from trained_spans(event, trained, False)

    def lag(self) -> int:
        found = backlogs(self.cluster, self.settings)
        return sum(b.records for b in found if b.group == self.group)


@pytest.fixture
def traced(settings: Settings, cluster: Cluster, tmp_path: Path) -> Iterator[Traced]:
    with Processes(tmp_path / "logs") as processes:
        yield Traced(settings, cluster, processes)


def test_every_span_comes_through_an_outage_and_kill_9(
    traced: Traced, eventually: Eventually
) -> None:
    receiver = Receiver()
    traced.round()
    process = traced.start()
    log = lambda: traced.processes.log("traces")  # noqa: E731
    eventually(lambda: "collector_takes_no_spans" in log())
    start = traced.cluster.committed(traced.group)
    traced.round()
    assert traced.lag() > 0 and traced.cluster.committed(traced.group) == start
    with receiving(receiver, traced.port):
        eventually(lambda: len(receiver.spans) == len(traced.expected()))
        eventually(lambda: traced.lag() == 0)
        traced.round()
        eventually(lambda: receiver.received > len(traced.expected()) / 2)
        process.kill()
        process.wait()
        receiver.status = 503
        process = traced.start()
        traced.round()
        eventually(lambda: receiver.requests and receiver.status == 503)
        receiver.status = 200
        expected = traced.expected()
        eventually(lambda: receiver.spans.keys() == expected.keys())
        assert {key: span.name for key, span in receiver.spans.items()} == expected
        eventually(lambda: traced.lag() == 0)
        assert traced.processes.stop(process) == 0
        before = receiver.received
        process = traced.start()
        traced.round()
        expected = traced.expected()
        eventually(lambda: receiver.spans.keys() == expected.keys())
        assert traced.processes.stop(process) == 0
    assert receiver.differing == []
    # An orderly stop commits: only the first report of a worker is not known to be an old one.
    assert receiver.received - before <= len(expected) / traced.rounds + 1
    assert "Traceback" not in log()


def test_a_group_is_expected_and_lags_once_an_endpoint_is_set(traced: Traced) -> None:
    assert traced.group in expected_groups(traced.settings)
    assert traced.group not in expected_groups(Settings(kafka=traced.settings.kafka))
    traced.round()
    assert traced.lag() == 31


def test_without_an_endpoint_the_process_says_what_to_set(traced: Traced) -> None:
    traced.settings = Settings(kafka=traced.settings.kafka)
    assert traced.start().wait() == 2
    assert "setting traces.endpoint" in traced.processes.log("traces")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_every_span_comes_whatever_happens_to_the_process_and_the_collector(
    traced: Traced, eventually: Eventually, seed: int
) -> None:
    """Kills, refusals, outages and a collector that answers late, in any order."""
    chance, receiver = random.Random(seed), Receiver()
    process = traced.start()
    with ExitStack() as stack:
        serving = stack.enter_context(ExitStack())
        serving.enter_context(receiving(receiver, traced.port))
        for _ in range(40):
            for _ in range(chance.randrange(1, 6)):
                traced.round()
            match chance.choice(["kill", "stop", "refuse", "away", "come back"]):
                case "kill":
                    process.kill()
                    process.wait()
                    process = traced.start()
                case "stop":  # also before it handles signals
                    assert traced.processes.stop(process) in (0, -signal.SIGTERM)
                    process = traced.start()
                case "refuse":
                    receiver.status = chance.choice([401, 404, 429, 500, 503])
                case "away":
                    serving.close()
                case "come back":
                    receiver.status = 200
                    serving.close()
                    serving.enter_context(receiving(receiver, traced.port))
            time.sleep(chance.uniform(0, 3))  # of the process, to come anywhere
        receiver.status = 200
        serving.close()
        serving.enter_context(receiving(receiver, traced.port))
        expected = traced.expected()
        eventually(lambda: receiver.spans.keys() == expected.keys(), 300)
        eventually(lambda: traced.lag() == 0)
        resident_kb = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * (
            os.sysconf("SC_PAGE_SIZE") // 1024
        )
        assert resident_kb < 400_000
    assert {key: span.name for key, span in receiver.spans.items()} == expected
    assert receiver.differing == []
