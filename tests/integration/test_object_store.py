"""Lake, blobs and weights in a real S3-compatible object store, which is killed and restarted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from s3fs import S3FileSystem  # type: ignore[import-untyped]
from support.lake import Eventually, Writers, a_step, column, put_steps, running
from support.object_store import BUCKET, ObjectStore, object_store
from support.trainer_runs import MemoryWeightLog, begin, go
from support.trainer_runs import settings as trainer_settings

from clawstream.gateway.durability.blobs import Blobs
from clawstream.gateway.durability.log import Message
from clawstream.gateway.errors import BlobsUnavailable
from clawstream.runtime.blob_store import BlobMissing, BlobStore, BlobStoreAway
from clawstream.runtime.digests import sha256
from clawstream.runtime.errors import WeightsUnreadable
from clawstream.runtime.exit_codes import EXIT_KAFKA
from clawstream.runtime.kafka import Cluster
from clawstream.runtime.topics.records import create_topics
from clawstream.runtime.weights.files import get_files
from clawstream.schemas.blob_refs import Movable
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import WeightVersion
from clawstream.schemas.settings import Settings
from clawstream.schemas.topics import MAX_RECORD_BYTES
from clawstream.stream_jobs.lake.delta.maintenance import SMALL_FILES
from clawstream.stream_jobs.lake.delta.table import CommitCollided, commit, create, open_table
from clawstream.stream_jobs.lake.tables.catalog import catalog
from clawstream.trainer.errors import StorageFailed

pytestmark = pytest.mark.long
RACERS, ROUNDS = 6, 5
WRONG = "a-wrong-secret"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with (
        object_store(tmp_path_factory.mktemp("store")) as made,
        pytest.MonkeyPatch.context() as environment,
    ):
        for name, value in made.environment.items():
            environment.setenv(name, value)
        yield made


@pytest.fixture
def remote(settings: Settings, store: ObjectStore, tmp_path: Path) -> Settings:
    """Return settings of an installation whose lake is in the object store."""
    lake = {
        "uri": f"s3://{BUCKET}/{tmp_path.name}/lake",
        "storage_options": store.lake_options,
        "flush_interval_s": 0.2,
        "history_days": 1e-6,
    }
    return Settings.model_validate({**settings.model_dump(), "lake": lake})


@pytest.fixture
def processes(remote: Settings) -> Iterator[Writers]:
    with running(remote) as made:
        yield made


def steps_in(settings: Settings) -> list[str]:
    return sorted(column(settings, "steps", "step_id"))


def test_of_commits_to_one_snapshot_the_store_takes_one(remote: Settings) -> None:
    uri, options, table = remote.lake_uri, remote.lake.storage_options, catalog()["steps"]
    create(uri, "steps", table.schema, table.stats, timedelta(days=1), options)
    commit(open_table(uri, "steps", options), table.arrow([]), {"app": 1})
    for epoch in range(2, ROUNDS + 2):
        snapshots = [open_table(uri, "steps", options) for _ in range(RACERS)]
        with ThreadPoolExecutor(RACERS) as threads:
            done = [threads.submit(commit, s, table.arrow([]), {"app": epoch}) for s in snapshots]
        errors = [future.exception() for future in done]
        assert errors.count(None) == 1
        assert all(isinstance(e, CommitCollided) for e in errors if e is not None)
    newest = open_table(uri, "steps", options)
    assert newest.transaction_version("app") == ROUNDS + 1
    assert newest.version() == ROUNDS + 1  # the creation is version 0


def test_writers_go_on_after_the_store_was_killed_and_each_row_is_there_once(
    remote: Settings,
    store: ObjectStore,
    cluster: Cluster,
    processes: Writers,
    eventually: Eventually,
) -> None:
    create_topics(cluster, remote)
    producer, sent = cluster.producer(), 0
    writers = [processes.write(writers=2, writer=number) for number in range(2)]
    for round_ in range(2):
        for _ in range(8):
            put_steps(producer, remote, range(sent, sent + 50))
            put_steps(producer, remote, range(max(0, sent - 60), sent, 7))  # duplicates
            sent += 50
            time.sleep(0.1)
        eventually(lambda least=round_ * 400: len(steps_in(remote)) > least)
        store.kill()  # under the commits of two writers
        put_steps(producer, remote, range(sent, sent + 50))
        sent += 50
        away = 2 * (round_ + 1)
        eventually(lambda n=away: processes.log("lake").count("lake_store_away") >= n)
        store.start()

    def arrived() -> bool:
        assert [writer.poll() for writer in writers] == [None, None], "they wait for the store"
        return len(steps_in(remote)) >= sent

    def files() -> int:
        names = store.objects(f"{remote.data_dir.name}/lake/steps")
        return sum(name.endswith(".parquet") and "_log" not in name for name in names)

    eventually(arrived)
    while (before := files()) < SMALL_FILES:
        put_steps(producer, remote, range(sent, sent + 10))
        sent += 10
        eventually(arrived)
    producer.close()
    expected = sorted(a_step(number).step_id for number in range(sent))
    assert steps_in(remote) == expected
    assert processes.maintain().wait(180) == 0  # merges files
    assert processes.maintain().wait(180) == 0  # deletes the files that are merged
    assert [processes.stop(writer) for writer in writers] == [0, 0]
    assert steps_in(remote) == expected
    assert files() < before / 2


def test_a_record_above_the_limit_of_kafka_is_a_blob(store: ObjectStore, tmp_path: Path) -> None:
    codec, blobs = Codec(), BlobStore(f"s3://{BUCKET}/{tmp_path.name}/blobs")
    body = b'{"messages": "' + b"long " * (MAX_RECORD_BYTES // 4) + b'"}'
    whole = codec.encode(replace(a_step(1), request_json=body))
    assert len(whole) > MAX_RECORD_BYTES
    gateway = Blobs(blobs, codec, 60.0)
    (sent,) = gateway.fit_now([Message("steps", b"k", whole)])
    (again,) = gateway.fit_now([Message("steps", b"k", whole)])
    assert len(sent.value) < 10_000 and again.value == sent.value
    assert isinstance(codec.decode(sent.value), Movable)
    (name,) = store.objects(f"{tmp_path.name}/blobs")
    digest = name.rpartition("/")[2]
    assert BlobStore(f"s3://{BUCKET}/{tmp_path.name}/blobs").get(digest) == body
    assert blobs.age_s(digest) < 600
    store.kill()
    try:
        with pytest.raises(BlobsUnavailable):
            gateway.fit_now(
                [Message("steps", b"k", codec.encode(replace(a_step(2), request_json=body + b" ")))]
            )
    finally:
        store.start()
    assert blobs.get(digest) == body
    blobs.delete(digest)
    with pytest.raises(BlobMissing):
        blobs.get(digest)
    gateway.close()


def digests_of(version: WeightVersion, cache: Path) -> dict[str, str]:
    found = get_files(version.files, cache)
    assert all(sha256(path) == digest for path, digest in found.items())
    return {path.name: digest for path, digest in found.items()}


def test_full_versions_and_deltas_are_published_and_read(
    store: ObjectStore, tmp_path: Path, model_dir: Path
) -> None:
    uri = f"s3://{BUCKET}/{tmp_path.name}/weights"
    here, there = MemoryWeightLog(), MemoryWeightLog()
    local = trainer_settings(tmp_path / "a", model_dir, lr=1e-6, keep_versions=9)
    remote = trainer_settings(
        tmp_path / "b", model_dir, lr=1e-6, full_every=3, keep_versions=2, weights_uri=uri
    )
    go(begin(local, here), 0, 2)
    run = begin(remote, there)
    go(run, 0, 2)
    assert [v.format for v in there.published] == ["full", "delta", "delta", "full"]
    worker = tmp_path / "worker"  # it has the version before; another one begins with this one
    for at in (1, 2, 3):
        expected = digests_of(here.published[at], tmp_path / "none")
        assert digests_of(there.published[at], worker) == expected
        assert digests_of(there.published[at], tmp_path / f"worker-{at}") == expected
    go(run, 3, 3)
    kept = {name.split("/")[1] for name in store.objects(f"{tmp_path.name}/weights")}
    assert kept == {"3.0", "4.0"}
    with pytest.raises(WeightsUnreadable, match=r"weights/r/0\.0/.*FileNotFoundError"):
        get_files(there.published[0].files, tmp_path / "late")


def test_wrong_credentials_are_named(
    remote: Settings,
    store: ObjectStore,
    cluster: Cluster,
    processes: Writers,
    tmp_path: Path,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create_topics(cluster, remote)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", WRONG)
    S3FileSystem.clear_instance_cache()
    try:
        with pytest.raises(BlobStoreAway, match=f"blob s3://{BUCKET}/b/.*: PermissionError"):
            BlobStore(f"s3://{BUCKET}/b").put(b"bytes")
        weights = trainer_settings(tmp_path / "w", model_dir, weights_uri=f"s3://{BUCKET}/w")
        with pytest.raises(StorageFailed, match=f"s3://{BUCKET}/w.*signature .* does not match"):
            begin(weights, MemoryWeightLog())
        assert processes.write().wait(180) == EXIT_KAFKA
    finally:
        S3FileSystem.clear_instance_cache()
    assert "lacked the necessary privileges" in processes.log("lake")
    assert WRONG not in processes.log("lake")
    assert not store.objects("w") and not store.objects(f"{tmp_path.name}/lake")
