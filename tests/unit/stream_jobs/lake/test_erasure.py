"""Erase trajectories from a lake on disk: no file has them afterwards, other rows stay."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from support.assemble import failed_call
from support.lake import a_reward, a_step, column
from support.small_lake import SmallLake
from typer.testing import CliRunner

from clawstream.cli.lake.tables import app
from clawstream.query.sandbox import run_sql
from clawstream.runtime.blob_store import BlobMissing, BlobStore
from clawstream.schemas import records
from clawstream.schemas.blob_refs import reference, with_images
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.errors import InvalidId
from clawstream.schemas.records import Blob
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.lake.delta.maintenance import compact
from clawstream.stream_jobs.lake.delta.snapshots import SnapshotError, take_snapshot
from clawstream.stream_jobs.lake.erasure import BlobTooYoung, Erasure
from clawstream.stream_jobs.lake.main import open_table

pytestmark = pytest.mark.slow
WORD = "joe-lives-here"
JOE = {("r", "joe")}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path)


def step(number: int, **changes: Any) -> records.Step:
    return dataclasses.replace(a_step(number), trajectory_key="ann", **changes)


def of_joe(number: int, **changes: Any) -> records.Step:
    body = {"request_json": f'{{"text": "{WORD}"}}'.encode()}
    return dataclasses.replace(a_step(number), trajectory_key="joe", **body | changes)


def texts(lake: Path) -> Iterator[str]:
    """Yield the content of all files of a lake, of former versions and of none too."""
    for path in lake.rglob("*"):
        if path.suffix == ".parquet" and "_delta_log" not in path.parts:
            yield str(pq.read_table(path).to_pylist())
        elif path.is_file():
            yield path.read_bytes().decode(errors="replace")


def has(settings: Settings, word: str) -> bool:
    return any(word in text for text in texts(Path(settings.lake_uri)))


def found_by_key(settings: Settings, table: str, *keys: str) -> str:
    """Return the sorted keys that SQL finds in a table when it asks for these."""
    query = f"SELECT trajectory_key AS k FROM {table} WHERE k IN {keys} ORDER BY k"
    return str(run_sql(settings, query, "csv"))


def let_blobs_age(settings: Settings) -> None:
    for path in Path(settings.blob_uri).rglob("*/*"):
        os.utime(path, (0, 0))


def trained(key: str) -> records.TrainedTokens:
    return records.TrainedTokens(
        run_id="r", trajectory_key=key, trajectory_id=key, step_id=f"{key}~0.0", version_id="r/1.0",
        batch_seq=0, advantages=b"",
    )  # fmt: skip


def letter() -> records.DeadLetter:
    return records.DeadLetter(
        topic="claw.steps", topic_id="T", partition=0, offset=1, key=b"joe", value=WORD.encode(),
        timestamp_ms=1, process="assemble", reason="undecodable", detail="", created_at=1,
    )  # fmt: skip


def test_no_file_has_the_rows_and_others_stay(settings: Settings) -> None:
    lake = SmallLake(settings)
    lake.put("steps", "T", step(0), of_joe(1))
    lake.put("steps", "T", of_joe(2), dataclasses.replace(step(3), trajectory_key="bob"))
    lake.put("rewards", "R", a_reward(0), a_reward(1, trajectory_key="joe", reason=WORD))
    lake.put("rewards", "R", a_reward(2, trajectory_key="joe", run_id="other"))
    lake.put("trained_tokens", "N", trained("ann"), trained("joe"))
    lake.put("dead_letters", "D", letter())
    compact(open_table(settings.lake_uri, "steps", {}), "steps", {})  # leaves the small files
    assert has(settings, WORD)

    erasure = Erasure(settings, JOE)
    found = {f.table: (f.rows, f.topic, f.kept_until is None) for f in erasure.find()}
    assert found == {
        "steps": (2, "claw.steps", False),
        "rewards": (1, "claw.rewards", True),
        "trained_tokens": (1, "claw.trained-tokens", False),
        "dead_letters": (1, "claw.dead-letters", True),
    }
    assert erasure.run() == 0
    assert not has(settings, WORD)
    assert list(erasure.find()) == [] and erasure.run() == 0
    assert sorted(column(settings, "steps", "trajectory_key")) == ["ann", "bob"]
    assert found_by_key(settings, "steps", "ann", "bob", "joe") == "k\nann\nbob"
    assert sorted(column(settings, "rewards", "event_id")) == ["w0", "w2"]
    assert column(settings, "trained_tokens", "trajectory_key") == ["ann"]


def test_a_dead_letter_is_known_by_what_is_in_it(settings: Settings) -> None:
    codec, lake = Codec(), SmallLake(settings)
    marked = records.StepMark(
        event_id="m", run_id="r", trajectory_key="joe", trajectory_id="joe", step_id="joe~1.0",
        mark="late", offset=1,
    )  # fmt: skip
    values = {
        b"wrong": codec.encode(of_joe(1)),  # its key is why it is one
        b"r": codec.encode(marked),  # a key that is the run
        b"joe": codec.encode(of_joe(2, run_id="other")),
        b"ann": codec.encode(step(3)),
        b"joe ": b"no Avro",
    }
    letters = [
        dataclasses.replace(letter(), key=key.strip(), value=value, offset=number)
        for number, (key, value) in enumerate(values.items())
    ]
    lake.put(
        "dead_letters", "D", *letters, dataclasses.replace(letter(), key=None, value=None, offset=9)
    )
    erasure = Erasure(settings, JOE)
    assert [(f.table, f.rows) for f in erasure.find()] == [("dead_letters", 3)]
    erasure.run()
    assert column(settings, "dead_letters", "offset") == [2, 3, 9]


def test_a_writer_that_runs_goes_on_and_writes_each_row_once(settings: Settings) -> None:
    lake = SmallLake(settings)
    lake.put("steps", "T", step(0), of_joe(1))
    Erasure(settings, JOE).run()  # the writer has opened the version before
    lake.put("steps", "T", step(0), step(4), of_joe(5))  # the first one is a duplicate
    Erasure(settings, JOE).run()
    lake.put("steps", "T", step(6))
    found = sorted(column(settings, "steps", "step_id"))
    assert found == [a_step(n).step_id for n in (0, 4, 6)]
    again = SmallLake(settings)
    again.next = dict(lake.next)
    again.put("steps", "T", step(6), step(7))
    assert len(column(settings, "steps", "step_id")) == 4 and not has(settings, WORD)


def test_a_blob_goes_unless_another_trajectory_names_it(settings: Settings) -> None:
    store, lake = BlobStore(settings.blob_uri), SmallLake(settings)
    own, shared = (
        Blob(field="request_json", url="", sha256=store.put(data), size_bytes=len(data))
        for data in (b"own", b"shared")
    )
    lake.put(
        "steps",
        "T",
        of_joe(
            1,
            request_json=reference(own),
            response_json=reference(shared),
            blobs=(own, shared),
        ),
        step(2, response_json=reference(shared), blobs=(shared,)),
    )
    let_blobs_age(settings)
    erasure = Erasure(settings, JOE)
    assert erasure.blobs() == {own.sha256} and erasure.run() == 1
    assert store.get(shared.sha256) == b"shared"
    with pytest.raises(BlobMissing):
        store.get(own.sha256)
    store.delete(own.sha256)  # it may be repeated


def test_an_image_goes_unless_another_trajectory_sent_it(settings: Settings) -> None:
    store, lake = BlobStore(settings.blob_uri), SmallLake(settings)

    def sent(record: records.Step, *images: bytes) -> records.Step:
        return with_images(record, images, store.url_of).record  # type: ignore[return-value]

    own, shared = (store.put(image) for image in (b"own", b"shared"))
    lake.put("steps", "T", sent(of_joe(1), b"own", b"shared"), sent(step(2), b"shared"), step(3))
    let_blobs_age(settings)
    assert Erasure(settings, JOE).run() == 1
    assert store.get(shared) == b"shared"
    with pytest.raises(BlobMissing):
        store.get(own)


def test_a_blob_that_was_written_again_lately_is_kept(settings: Settings) -> None:
    store, lake = BlobStore(settings.blob_uri), SmallLake(settings)
    digest = store.put(b"picture")
    lake.put("steps", "T", with_images(of_joe(1), [b"picture"], store.url_of).record)
    let_blobs_age(settings)
    # Of a step that the lake has yet to read, by a process that does not know the blob.
    BlobStore(settings.blob_uri).put(b"picture")
    with pytest.raises(BlobTooYoung, match="erase again"):
        Erasure(settings, JOE).run()
    assert store.get(digest) and has(settings, WORD)


def test_rows_without_a_trajectory_are_counted_and_stay(settings: Settings) -> None:
    lake = SmallLake(settings)
    failed = (failed_call("joe"), failed_call(None))
    lake.put("failed_calls", "T", *failed)
    lake.put("dead_letters", "D", letter())
    args = ["erase", "--table", "failed_calls", "--where", "true", "--yes"]
    done = CliRunner().invoke(app, [*args, f"data_dir={settings.data_dir}"])
    assert done.exit_code == 0, done.output
    assert "failed_calls: 1 rows belong to no trajectory and stay" in done.output
    assert "dead_letters: of every run, where a letter has only its key" in done.output
    assert column(settings, "failed_calls", "trajectory_key") == [None]


@pytest.mark.parametrize(
    ("options", "what", "left"),
    [
        (("--run", "other"), "erased 1 trajectories of other, 1 rows", ["r"]),
        (("--run", "nobody"), "erased 0 trajectories of no run, 0 rows", ["other", "r"]),
        ((), "erased 2 trajectories of other, r, 2 rows", []),
    ],
)
def test_a_condition_erases_the_given_run_only(
    settings: Settings, options: Sequence[str], what: str, left: list[str]
) -> None:
    SmallLake(settings).put("steps", "T", of_joe(1), of_joe(2, run_id="other"))
    words = ["erase", "--where", "choice_index = 0 or true", *options, "--yes"]
    done = CliRunner().invoke(app, [*words, f"data_dir={settings.data_dir}"])
    assert (done.exit_code, what in done.output) == (0, True), done.output
    assert sorted(column(settings, "steps", "run_id")) == left


def test_a_table_without_a_condition_is_refused(settings: Settings) -> None:
    words = ["erase", "--trajectory", "joe", "--table", "rewards", f"data_dir={settings.data_dir}"]
    assert CliRunner().invoke(app, words).exit_code == 2


def test_a_named_snapshot_and_a_wrong_key_are_refused(settings: Settings) -> None:
    SmallLake(settings).put("steps", "T", of_joe(1))
    with pytest.raises(InvalidId):
        Erasure(settings, {("r", "a' OR 'b")})
    take_snapshot(settings, "paper")
    erasure = Erasure(settings, JOE)
    assert [found.rows for found in erasure.find()] == [1], "what it would erase is counted"
    with pytest.raises(SnapshotError, match="snapshot paper --delete"):
        erasure.run()
