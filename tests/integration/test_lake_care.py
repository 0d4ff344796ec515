"""The lake writer on a real Kafka with care beside it, both killed at random; new fields while it runs; the lake made again from the topics."""

from __future__ import annotations

import copy
import io
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import fastavro
import pytest
from deltalake import DeltaTable

from runtime.config import words_of
from runtime.kafka import Cluster, Producer
from runtime.lifecycle import EXIT_FENCED
from runtime.records import create_topics
from schemas import events
from schemas.codec import MAGIC, Codec, fingerprint_of, shipped
from schemas.settings import LakeSettings, Settings
from schemas.tokens import pack_ids
from stream_jobs.lake import dataset, open_table
from stream_jobs.sql import connect

Eventually = Callable[..., Any]
WRITER = (
    "import sys\nfrom runtime.config import load\nfrom stream_jobs.lake import main\nmain(load(None, sys.argv[1:], {}))"
)


class Processes:
    """The writer and the caretaker of one installation."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.started: list[subprocess.Popen[bytes]] = []
        self.log = settings.data_dir / "lake.log"

    def write(self, **lake: Any) -> subprocess.Popen[bytes]:
        words = [*words_of(self.settings), *(f"lake.{k}={v}" for k, v in lake.items())]
        return self._start([sys.executable, "-c", WRITER, *words])

    def care(self) -> subprocess.Popen[bytes]:
        process = self._start([sys.executable, "-m", "stream_jobs.lake_care"], subprocess.PIPE)
        assert process.stdin is not None
        with process.stdin as stdin:
            stdin.write(self.settings.model_dump_json().encode())
        return process

    def _start(self, command: list[str], stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            self.started.append(subprocess.Popen(command, stdin=stdin, stdout=log, stderr=log))
        return self.started[-1]

    def stop(self, process: subprocess.Popen[bytes]) -> int:
        process.send_signal(signal.SIGTERM)
        return process.wait(60)


@pytest.fixture
def processes(settings: Settings) -> Iterator[Processes]:
    out = Processes(settings)
    yield out
    for process in out.started:
        if process.poll() is None:
            process.kill()
        process.wait(60)
    print(out.log.read_text() if out.log.exists() else "")


def column(settings: Settings, table: str, name: str) -> list[Any]:
    if not DeltaTable.is_deltatable(f"{settings.lake_uri}/{table}"):
        return []
    found = dataset(open_table(settings.lake_uri, table, {}), {}).to_table(columns=[name])
    return found.column(name).to_pylist()  # type: ignore[no-any-return]


def a_step(number: int) -> events.Step:
    key = f"k{number % 17}"
    return events.Step(
        step_id=f"{key}~{number:08d}.0", run_id="r", trajectory_key=key, call_id=f"{key}~{number:08d}", choice_index=0,
        protocol="openai.chat", model="policy", status="ok", streamed=False, request_json=b"{}", response_json=b"{}",
        prompt_token_ids=pack_ids(range(number % 50)), gateway_id="g", received_at=number, finished_at=number,
    )  # fmt: skip


def put_steps(producer: Producer, settings: Settings, first: int, count: int) -> None:
    codec = Codec()
    for number in range(first, first + count):
        step = a_step(number)
        producer.put(settings.kafka.topics.steps, step.trajectory_key.encode(), codec.encode(step))
    producer.flush()


def test_rows_are_the_steps_whoever_is_killed_while_files_are_merged(
    settings: Settings, cluster: Cluster, processes: Processes, eventually: Eventually
) -> None:
    create_topics(cluster, settings)
    processes.settings = settings = settings.model_copy(update={"lake": LakeSettings(history_days=1e-3)})
    rng, producer, sent = random.Random(3), cluster.producer(), 0
    flush = {"flush_interval_s": 0.02, "flush_rows": 20}
    writer, carer = processes.write(**flush), processes.care()
    killed = {"writer": 0, "carer": 0}

    def merges() -> int:
        where = f"{settings.lake_uri}/steps"
        there = DeltaTable(where).history() if DeltaTable.is_deltatable(where) else []
        return sum(entry.get("operation") == "OPTIMIZE" for entry in there)

    deadline = time.monotonic() + 120
    while min(killed.values()) < 2 or merges() < 2:
        assert time.monotonic() < deadline, (killed, merges())
        for _ in range(20):
            put_steps(producer, settings, sent, 30)
            sent += 30
            time.sleep(0.03)
        if carer.poll() is not None:
            carer = processes.care()
        elif rng.random() < 0.5:
            carer.kill()
            killed["carer"] += 1
        if rng.random() < 0.3:
            writer.kill()
            writer.wait()
            writer = processes.write(**flush)
            killed["writer"] += 1
    eventually(lambda: len(set(column(settings, "steps", "step_id"))) == sent)
    carer.kill()
    carer.wait()
    assert processes.care().wait(60) == 0
    assert processes.stop(writer) == 0
    assert sorted(column(settings, "steps", "step_id")) == sorted(a_step(n).step_id for n in range(sent))
    producer.close()


def test_a_new_field_becomes_a_column_while_the_old_writer_runs(
    settings: Settings, cluster: Cluster, processes: Processes, eventually: Eventually
) -> None:
    create_topics(cluster, settings)
    topics, codec, producer = settings.kafka.topics, Codec(), cluster.producer()
    writer = processes.write(flush_interval_s=0.1)
    put_steps(producer, settings, 0, 1)
    eventually(lambda: len(column(settings, "steps", "step_id")) == 1)

    newer = copy.deepcopy(shipped("Step"))
    newer["fields"].append({"name": "region", "type": ["null", "string"], "default": None, "doc": "Where it ran."})
    tags = next(f for f in newer["fields"] if f["name"] == "tags")
    tags["type"]["items"]["fields"].append(
        {"name": "score", "type": ["null", "double"], "default": None, "doc": "How sure."}
    )
    announced = events.SchemaPublished(
        fingerprint=fingerprint_of(newer), name="clawstream.Step", schema_json=json.dumps(newer), created_at=1
    )
    producer.put(topics.schemas, announced.fingerprint.encode(), codec.encode(announced))
    producer.flush()
    plain = fastavro.schemaless_reader(
        io.BytesIO(codec.encode(a_step(1))[10:]), fastavro.parse_schema(shipped("Step")), None
    )
    body = io.BytesIO()
    record = plain | {"region": "north", "tags": [{"name": "t", "evidence": "e", "score": 0.5}]}
    fastavro.schemaless_writer(body, fastavro.parse_schema(newer), record)
    producer.put(topics.steps, b"k1", MAGIC + bytes.fromhex(announced.fingerprint) + body.getvalue())
    put_steps(producer, settings, 2, 1)
    eventually(lambda: len(column(settings, "steps", "step_id")) == 3)
    assert writer.poll() is None
    # a writer that starts anew knows nothing of the field until it sees it, and loses none
    newer_writer = processes.write(flush_interval_s=0.1)
    eventually(lambda: processes.log.read_text().count("lake_follows") >= 14)
    put_steps(producer, settings, 3, 1)
    eventually(lambda: len(column(settings, "steps", "step_id")) == 4)
    assert writer.wait(60) == EXIT_FENCED
    assert processes.stop(newer_writer) == 0
    query = "select step_id, region, list_transform(tags, lambda t: t.score) from steps order by 1"
    steps = [a_step(n).step_id for n in range(4)]
    assert connect(settings).execute(query).fetchall() == [
        (steps[0], None, []), (steps[1], "north", [0.5]), (steps[2], None, []), (steps[3], None, []),
    ]  # fmt: skip
    # other readers too: by Delta's own list of files, and by pyarrow
    uris = DeltaTable(f"{settings.lake_uri}/steps").file_uris()
    counted = duckdb.sql(f"select count(region), count(*) from read_parquet({uris}, union_by_name=true)").fetchall()
    assert counted == [(1, 4)]
    assert DeltaTable(f"{settings.lake_uri}/steps").to_pyarrow_table().column("region").null_count == 3
    region = next(f for f in DeltaTable(f"{settings.lake_uri}/steps").schema().fields if f.name == "region")
    assert region.metadata == {"comment": "Where it ran."}
    producer.close()


def test_a_lake_that_was_deleted_is_made_again_from_the_topics(
    settings: Settings, cluster: Cluster, processes: Processes, eventually: Eventually, tmp_path: Path
) -> None:
    create_topics(cluster, settings)
    producer, codec, topics = cluster.producer(), Codec(), settings.kafka.topics
    put_steps(producer, settings, 0, 200)
    put_steps(producer, settings, 50, 20)  # sent twice
    for number in range(30):
        reward = events.Reward(
            event_id=f"e{number % 20}", run_id="r", trajectory_key="k", source="rule", name="f", function_version="1",
            value=float(number), reward_revision=0, created_at=number,
        )  # fmt: skip
        producer.put(topics.rewards, b"k", codec.encode(reward))
    producer.flush()

    def rows(table: str) -> list[tuple[Any, ...]]:
        return connect(settings).execute(f"select * from {table}_raw order by all").fetchall()  # type: ignore[no-any-return]

    found = []
    for _ in range(2):
        shutil.rmtree(settings.lake_uri, ignore_errors=True)
        writer = processes.write(flush_interval_s=0.1)
        eventually(lambda: len(column(settings, "steps", "step_id")) == 200)
        eventually(lambda: len(column(settings, "rewards", "event_id")) == 20)
        assert processes.stop(writer) == 0
        found.append([rows(t) for t in ("steps", "rewards", "schemas")])
    assert found[0] == found[1]
    producer.close()
