"""Weight versions: files that anyone can load, checksums, and the manifest on the weights log."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from runtime.kafka import Cluster, Producer, Record
from runtime.records import Decoder, dead_letter, now_micros
from runtime.telemetry import logger
from schemas.codec import Codec
from schemas.errors import Undecodable, UnknownSchema
from schemas.events import WeightFile, WeightVersion
from schemas.ids import Version, parse_version
from schemas.topics import Topics
from trainer.checkpoint import MODEL, State
from trainer.version_dir import directory_of, new_directory, read_info


class Ledger:
    """The weights log, as the one trainer that may write to it. Making one fences every older trainer of the run.

    Whatever is written goes through one transactional producer, so a fenced trainer can write nothing, dead letters included.
    """

    def __init__(self, cluster: Cluster, topics: Topics, run_id: str) -> None:
        self._producer: Producer = cluster.producer(f"{topics.prefix}-trainer.{run_id}.train")
        self._topics, self._run_id, self._codec = topics, run_id, Codec()
        self.topic_id = cluster.topic_id(topics.weights)

    def publish(self, version: WeightVersion) -> None:
        """Put the manifest on the log. From here on the version and its checkpoint count. Raises Fenced."""
        with self._producer.transaction():
            self._producer.put(self._topics.weights, version.version_id.encode(), self._codec.encode(version))

    def bury(self, record: Record, topic_id: str, reason: str, detail: str) -> None:
        """Dead-letter a record. It may be buried again after a restart: the same place each time."""
        letter = dead_letter(record, topic_id, "trainer", reason, detail)
        with self._producer.transaction():
            self._producer.put(self._topics.dead_letters, record.key, self._codec.encode(letter))
        logger().warning("dead_letter", topic=record.topic, offset=record.offset, reason=reason, detail=detail)

    def raise_if_fenced(self) -> None:
        """Ask the broker by a transaction that is given up: Fenced when a newer trainer took over, else nothing."""
        try:
            with self._producer.transaction():
                self._producer.put(self._topics.weights, self._run_id.encode(), None)
                self._producer.flush()
                raise _GivenUp
        except _GivenUp:
            return

    def close(self) -> None:
        self._producer.close()


class _GivenUp(Exception):
    """Ends the transaction of `raise_if_fenced`."""


def read_versions(
    cluster: Cluster, decoder: Decoder, topic: str, run_id: str
) -> tuple[list[WeightVersion], set[Version]]:
    """The run's versions in log order, and all its ids: an id counts as taken even if its record can't be read."""
    versions: list[WeightVersion] = []
    taken: set[Version] = set()
    for record in cluster.read_all(topic):
        key = parse_version((record.key or b"").decode(errors="replace"))
        if key is not None and key.run_id == run_id:
            taken.add(key)
        try:
            version = decoder.decode(record.value)
        except (Undecodable, UnknownSchema) as e:
            logger().warning("weight_version_unreadable", offset=record.offset, error=str(e))  # the lake buries it
            continue
        if isinstance(version, WeightVersion) and version.run_id == run_id:
            versions.append(version)
            taken.add(Version(run_id, version.sync_index, version.attempt))
    return versions, taken


def export(root: Path, state: State, checkpoint: Path) -> tuple[WeightFile, ...]:
    """Publish the checkpoint's model directory under `root`. Hard links where the file system allows, else copies."""
    final = directory_of(root, state.version)
    with new_directory(final, asdict(state)) as tmp:
        for file in sorted((checkpoint / MODEL).iterdir()):
            _link(file, tmp / file.name)
    return tuple(
        WeightFile(url=(final / name).as_uri(), sha256=digest, size_bytes=(final / name).stat().st_size)
        for name, digest in sorted(read_info(final)["files"].items())
    )


def manifest(
    state: State, first_batch_seq: int, files: tuple[WeightFile, ...], checkpoint: Path, metrics: Mapping[str, float]
) -> WeightVersion:
    """The record of a version. Its batches: from first_batch_seq to its own position; none when that is not beyond."""
    last = state.position.next_batch_seq - 1
    trained = first_batch_seq <= last
    return WeightVersion(
        version_id=state.version_id,
        run_id=state.run_id,
        sync_index=state.sync_index,
        attempt=state.attempt,
        parent_version=state.parent_version,
        format="full",
        files=files,
        checkpoint_url=checkpoint.as_uri(),
        channel="train",
        batches_topic_id=state.position.topic_id,
        first_batch_seq=first_batch_seq if trained else None,
        last_batch_seq=last if trained else None,
        metrics=metrics,
        created_at=now_micros(),
    )


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
