"""The progress of a run according to its topics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile

from clawstream.runtime.kafka import Cluster, Record
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.codec.single_object import Event
from clawstream.schemas.errors import Undecodable, UnknownSchema
from clawstream.schemas.records import Refused, RolloutBudget, WeightVersion, WorkerStatus
from clawstream.schemas.settings import Settings

NEWEST = 5000
"""Number of newest decisions whose refusals are shown by reason; a search reads as many at once."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run according to its topics.

    version: Id of the newest weight version. reward_fall: Its metric of this name. serving: Worker
    to its state and version. batches, admitted, refused: Of
    the train channel, in all, with groups. newest_refusals: Refused groups by reason, among its
    `NEWEST` newest decisions.
    """

    version: str | None = None
    reward_fall: float | None = None
    serving: Mapping[str, str] = field(default_factory=dict)
    batches: int = 0
    admitted: int = 0
    refused: int = 0
    newest_refusals: Mapping[str, int] = field(default_factory=dict)


def progress_of(settings: Settings, cluster: Cluster) -> Progress:
    """Read the progress from the topics. Raises KafkaError."""
    topics, run = settings.kafka.topics, settings.run_id
    there, decoder = cluster.topics(), Decoder(cluster, topics.schemas)

    def decoded(records: Iterable[Record]) -> Iterator[Event]:
        """Yield the readable records."""
        for record in records:
            with suppress(Undecodable, UnknownSchema):
                if record.value is not None:
                    yield decoder.decode(record.value)

    def all_of(topic: str) -> Iterator[Event]:
        """Yield the readable records of a compacted topic with one partition."""
        return decoded(cluster.read_all(topic) if topic in there else ())

    serving = dict[str, str]()
    for event in all_of(topics.workers):
        if isinstance(event, WorkerStatus) and event.run_id == run:
            silent_s = time.time() - event.heartbeat_at / 1e6
            allowed_s = 5 * event.heartbeat_interval_ms / 1000
            silent = f", silent for {silent_s:.0f} s" if silent_s > allowed_s else ""
            serving[event.worker_id] = (
                f"{event.state}, {event.weight_version or 'boot weights'}{silent}"
            )
    batches = admitted = refused = 0
    for event in all_of(topics.budgets):
        if isinstance(event, RolloutBudget) and (event.run_id, event.channel) == (run, "train"):
            batches, admitted = event.next_batch_seq, event.groups_admitted
            refused = event.groups_refused
    reasons, decisions = Counter[str](), topics.ready_batches(run, "train")
    if decisions in there:
        low, end = cluster.watermarks(decisions, [0])[0]
        for event in decoded(cluster.read_all(decisions, first=max(low, end - NEWEST))):
            if isinstance(event, Refused) and event.whole_group:
                reasons[event.reason] += 1
    newest = None
    if topics.weights in there:
        newest = _newest_version(cluster, topics.weights, run, decoded)
    return Progress(
        version=newest.version_id if newest else None,
        reward_fall=newest.metrics.get("reward_fall") if newest else None,
        serving=serving,
        batches=batches,
        admitted=admitted,
        refused=refused,
        newest_refusals=dict(reasons.most_common()),
    )


def _newest_version(
    cluster: Cluster, topic: str, run: str, decoded: Callable[[Iterable[Record]], Iterable[Event]]
) -> WeightVersion | None:
    """Return the newest version of a run. Runs share the log, so the search goes back in parts."""
    low, end = cluster.watermarks(topic, [0])[0]
    while end > low:
        first, version = max(low, end - NEWEST), None
        for event in decoded(_between(cluster, topic, first, end)):
            if isinstance(event, WeightVersion) and event.run_id == run:
                version = event
        if version is not None:
            return version
        end = first
    return None


def _between(cluster: Cluster, topic: str, first: int, end: int) -> Iterator[Record]:
    return takewhile(lambda record: record.offset < end, cluster.read_all(topic, first=first))
