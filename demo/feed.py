"""What the demo sees of the running loop: it reads the topics like any other consumer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from clawstream.runtime.kafka import Cluster
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.ids import parse_version
from clawstream.schemas.records import ReadyBatch, Refused, WeightVersion, WorkerStatus
from clawstream.schemas.settings import Settings


@dataclass(slots=True)
class LoopState:
    """The run as its topics tell it. Numbers of groups are of channel train."""

    versions: dict[int, WeightVersion] = field(default_factory=dict)
    worker: WorkerStatus | None = None
    engines_started: set[int] = field(default_factory=set)
    versions_loaded: set[str] = field(default_factory=set)
    batches: int = 0
    admitted_groups: int = 0
    refused_groups: int = 0

    @property
    def published(self) -> int | None:
        """Sync index of the newest version; None before the first."""
        return max(self.versions, default=None)

    @property
    def loaded(self) -> int | None:
        """Sync index that the engine serves."""
        if (
            self.worker is None
            or self.worker.state != "ready"
            or self.worker.weight_version is None
        ):
            return None
        version = parse_version(self.worker.weight_version)
        return version.sync_index if version else None

    def see(self, record: object) -> None:
        """Fold one record."""
        match record:
            case WeightVersion():
                self.versions[record.sync_index] = record
            case WorkerStatus():
                self.worker = record
                if record.weight_version is not None:
                    self.engines_started.add(record.started_at)
                    self.versions_loaded.add(record.weight_version)
            case ReadyBatch():
                self.batches += 1
                self.admitted_groups += len(record.groups)
            case Refused(whole_group=True):
                self.refused_groups += 1


async def follow(
    cluster: Cluster, settings: Settings, state: LoopState, stop: asyncio.Event
) -> None:
    """Keep `state` up to date until `stop`."""
    topics = settings.kafka.topics
    decoder = Decoder(cluster, topics.schemas)
    names = (topics.weights, topics.workers, topics.ready_batches(settings.run_id, "train"))
    reader = cluster.reader("clawstream-demo", {(name, 0): 0 for name in names})
    try:
        while not stop.is_set():
            for record in await asyncio.to_thread(reader.poll, 500, 0.2):
                if record.value is not None:
                    state.see(decoder.decode(record.value))
    finally:
        await asyncio.to_thread(reader.close)
