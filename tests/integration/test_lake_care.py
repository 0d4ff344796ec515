"""The lake writer on a real Kafka with maintenance, both killed at random.

Other tests add new fields while the writer runs, and rebuild the lake from the topics.
"""

from __future__ import annotations

import copy
import io
import json
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import fastavro
import pytest
from deltalake import DeltaTable
from support.lake import Eventually, Writers, a_reward, a_step, column, put_steps, running
from support.patience import Patience

from clawstream.query.connection import connect
from clawstream.runtime.exit_codes import EXIT_FENCED
from clawstream.runtime.kafka import Cluster
from clawstream.runtime.topics.records import create_topics
from clawstream.schemas import records
from clawstream.schemas.codec.foreign import fingerprint_of
from clawstream.schemas.codec.single_object import MAGIC, TOP_LEVEL, Codec, shipped
from clawstream.schemas.settings import LakeSettings, Settings


@pytest.fixture
def processes(settings: Settings) -> Iterator[Writers]:
    with running(settings) as made:
        yield made


def test_rows_are_the_steps_whoever_is_killed_while_files_are_merged(
    settings: Settings, cluster: Cluster, processes: Writers, eventually: Eventually
) -> None:
    create_topics(cluster, settings)
    processes.settings = settings = settings.model_copy(
        update={"lake": LakeSettings(history_days=1e-3)}
    )
    rng, producer, sent = random.Random(3), cluster.producer(), 0
    flush = {"flush_interval_s": 0.02, "flush_rows": 20}
    killed = {"writer": 0, "maintenance": 0}

    def merges() -> int:
        where = f"{settings.lake_uri}/steps"
        there = DeltaTable(where).history() if DeltaTable.is_deltatable(where) else []
        return sum(entry.get("operation") == "OPTIMIZE" for entry in there)

    def version() -> int:
        where = f"{settings.lake_uri}/steps"
        return DeltaTable(where).version() if DeltaTable.is_deltatable(where) else 0

    # The kills do not depend on the machine's speed. A writer is killed after it has written. Every
    # second maintenance process is killed within the duration of the previous one.
    writer, before = processes.write(**flush), version()
    maintenance, began, lasts, mortal = processes.maintain(), time.monotonic(), 0.0, False
    doomed = 0.0
    patience = Patience(400)
    while min(killed.values()) < 2 or merges() < 2:
        patience.check((killed, merges()))
        for _ in range(20):
            put_steps(producer, settings, range(sent, sent + 30))
            sent += 30
            time.sleep(0.03)
        lived = time.monotonic() - began
        if maintenance.poll() is not None:
            lasts = lasts if mortal else lived
            maintenance, began, mortal = processes.maintain(), time.monotonic(), not mortal
            doomed = rng.uniform(0.3, 1.0) * lasts
        elif mortal and lived > doomed:
            maintenance.kill()
            maintenance.wait()
            killed["maintenance"] += 1
        if version() > before + 5 and rng.random() < 0.3:
            writer.kill()
            writer.wait()
            writer, before = processes.write(**flush), version()
            killed["writer"] += 1
    eventually(lambda: len(set(column(settings, "steps", "step_id"))) == sent)
    maintenance.kill()
    maintenance.wait()
    assert processes.maintain().wait(180) == 0
    assert processes.stop(writer) == 0
    assert sorted(column(settings, "steps", "step_id")) == sorted(
        a_step(n).step_id for n in range(sent)
    )
    producer.close()


def test_a_new_field_becomes_a_column_while_the_old_writer_runs(
    settings: Settings, cluster: Cluster, processes: Writers, eventually: Eventually
) -> None:
    create_topics(cluster, settings)
    topics, codec, producer = settings.kafka.topics, Codec(), cluster.producer()
    writer = processes.write(flush_interval_s=0.1)
    put_steps(producer, settings, [0])
    eventually(lambda: len(column(settings, "steps", "step_id")) == 1)

    newer = copy.deepcopy(shipped("Step"))
    newer["fields"].append(
        {"name": "region", "type": ["null", "string"], "default": None, "doc": "Where it ran."}
    )
    tags = next(f for f in newer["fields"] if f["name"] == "tags")
    tags["type"]["items"]["fields"].append(
        {"name": "score", "type": ["null", "double"], "default": None, "doc": "How sure."}
    )
    announced = records.SchemaPublished(
        fingerprint=fingerprint_of(newer),
        name="clawstream.Step",
        schema_json=json.dumps(newer),
        created_at=1,
    )
    producer.put(topics.schemas, announced.fingerprint.encode(), codec.encode(announced))
    producer.flush()
    plain = fastavro.schemaless_reader(
        io.BytesIO(codec.encode(a_step(1))[10:]), fastavro.parse_schema(shipped("Step")), None
    )
    body = io.BytesIO()
    record = plain | {"region": "north", "tags": [{"name": "t", "evidence": "e", "score": 0.5}]}
    fastavro.schemaless_writer(body, fastavro.parse_schema(newer), record)
    producer.put(
        topics.steps, b"k1", MAGIC + bytes.fromhex(announced.fingerprint) + body.getvalue()
    )
    put_steps(producer, settings, [2])
    eventually(lambda: len(column(settings, "steps", "step_id")) == 3)
    assert writer.poll() is None
    # a restarted writer does not have the new field until it sees it, and loses no value
    newer_writer = processes.write(flush_interval_s=0.1)
    eventually(lambda: processes.log("lake").count("lake_follows") >= 14)
    put_steps(producer, settings, [3])
    eventually(lambda: len(column(settings, "steps", "step_id")) == 4)
    assert writer.wait(180) == EXIT_FENCED
    assert processes.stop(newer_writer) == 0
    query = "select step_id, region, list_transform(tags, lambda t: t.score) from steps order by 1"
    steps = [a_step(n).step_id for n in range(4)]
    assert connect(settings).execute(query).fetchall() == [
        (steps[0], None, []), (steps[1], "north", [0.5]), (steps[2], None, []),
        (steps[3], None, []),
    ]  # fmt: skip
    # other readers work too: by Delta's own list of files, and by pyarrow
    uris = DeltaTable(f"{settings.lake_uri}/steps").file_uris()
    counted = duckdb.sql(
        f"select count(region), count(*) from read_parquet({uris}, union_by_name=true)"
    ).fetchall()
    assert counted == [(1, 4)]
    assert (
        DeltaTable(f"{settings.lake_uri}/steps").to_pyarrow_table().column("region").null_count == 3
    )
    region = next(
        f for f in DeltaTable(f"{settings.lake_uri}/steps").schema().fields if f.name == "region"
    )
    assert region.metadata == {"comment": "Where it ran."}
    producer.close()


def test_a_lake_that_was_deleted_is_made_again_from_the_topics(
    settings: Settings, cluster: Cluster, processes: Writers, eventually: Eventually, tmp_path: Path
) -> None:
    create_topics(cluster, settings)
    producer, codec, topics = cluster.producer(), Codec(), settings.kafka.topics
    put_steps(producer, settings, range(200))
    put_steps(producer, settings, range(50, 70))  # duplicates
    for number in range(30):
        reward = a_reward(number, event_id=f"e{number % 20}")
        producer.put(topics.rewards, b"k", codec.encode(reward))
    producer.flush()

    def rows(table: str) -> list[tuple[Any, ...]]:
        return (  # type: ignore[no-any-return]
            connect(settings).execute(f"select * from {table}_raw order by all").fetchall()
        )

    found = []
    for _ in range(2):
        shutil.rmtree(settings.lake_uri, ignore_errors=True)
        writer = processes.write(flush_interval_s=0.1)
        eventually(lambda: len(column(settings, "steps", "step_id")) == 200)
        eventually(lambda: len(column(settings, "rewards", "event_id")) == 20)
        eventually(lambda: len(column(settings, "schemas", "fingerprint")) == len(TOP_LEVEL))
        assert processes.stop(writer) == 0
        found.append([rows(t) for t in ("steps", "rewards", "schemas")])
    assert found[0] == found[1]
    producer.close()
