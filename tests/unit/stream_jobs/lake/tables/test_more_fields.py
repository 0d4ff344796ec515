"""Fields of other releases add columns up to a limit; a record beyond it is a dead letter."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from clawstream.runtime.kafka import Cluster, Record
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas import records
from clawstream.schemas.codec.avro_schema import expanded
from clawstream.schemas.codec.single_object import MAGIC, Codec, shipped
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.errors import TooManyFields
from clawstream.stream_jobs.lake.consumer import LakeConsumer
from clawstream.stream_jobs.lake.delta.table import MORE_FIELDS
from clawstream.stream_jobs.lake.tables.catalog import catalog
from clawstream.stream_jobs.lake.tables.row_decoder import WriterSchemas
from clawstream.stream_jobs.lake.writer import Lake


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path)


@pytest.fixture
def lake(settings: Settings) -> Lake:
    lake = Lake(settings.lake_uri, {}, 100)
    lake.acquire()
    return lake


def with_fields(names: list[str], inside: bool = False) -> Any:
    """Return the schema of a reward with more fields.

    Args:
        inside: whether the fields belong to one struct.
    """
    schema = expanded(shipped("Reward"))
    more = [{"name": n, "type": ["null", "string"], "default": None, "doc": "New."} for n in names]
    if inside:
        struct = {"type": "record", "name": "More", "fields": more}
        more = [{"name": "more", "type": ["null", struct], "default": None, "doc": "New."}]
    return {**schema, "fields": [*schema["fields"], *more]}


@pytest.mark.slow
def test_a_table_gets_so_many_fields_of_others_and_no_more_whoever_writes(
    settings: Settings, lake: Lake
) -> None:
    """Fields of structs and fields that an earlier writer added count; existing fields do not."""
    many = [f"n{i}" for i in range(MORE_FIELDS)]
    with pytest.raises(
        TooManyFields, match=f"rewards .* {MORE_FIELDS + 1} fields .* at most {MORE_FIELDS} "
    ):
        lake.add_columns(lake.tables["rewards"].evolved(with_fields(many, inside=True)))
    assert lake.tables["rewards"] is catalog()["rewards"]
    assert lake.add_columns(lake.tables["rewards"].evolved(with_fields(many[1:], inside=True)))
    later = Lake(settings.lake_uri, {}, 100)
    later.acquire()
    with pytest.raises(TooManyFields):
        later.add_columns(later.tables["rewards"].evolved(with_fields(["team"])))
    assert later.add_columns(later.tables["rewards"].evolved(with_fields(many[1:3], inside=True)))


@pytest.mark.slow
def test_a_record_with_too_many_new_fields_becomes_a_dead_letter_with_its_bytes(
    settings: Settings, lake: Lake
) -> None:
    sent: list[bytes] = []

    class OneTopic:
        def reader(self, *_: Any, **__: Any) -> Any:
            return SimpleNamespace(positions={}, add=lambda start: None)

        def producer(self) -> Any:
            return SimpleNamespace(
                put=lambda topic, key, value: sent.append(value), flush=lambda: None
            )

        def topic_ids(self, topics: list[str]) -> dict[str, str]:
            return dict.fromkeys(topics, "T")

        def topics(self) -> dict[str, int]:
            return {topic: 1}

        def watermarks(self, topic: str, partitions: Any) -> dict[int, tuple[int, int]]:
            return {0: (0, 1)}

    topic, schemas, codec = settings.kafka.topics.rewards, WriterSchemas(), Codec()
    schema = {**shipped("Reward")}
    new = [
        {"name": f"n{i}", "type": ["null", "string"], "default": None}
        for i in range(MORE_FIELDS + 1)
    ]
    schema["fields"] = [*schema["fields"], *new]
    fingerprint = schemas.announce(json.dumps(schema))
    reward = records.Reward(
        event_id="e", run_id="r", trajectory_key="k", source="rule", name="f", function_version="1",
        reward_revision=0, created_at=1,
    )  # fmt: skip
    value = MAGIC + bytes.fromhex(fingerprint) + codec.encode(reward)[10:] + bytes(len(new))
    consumer = LakeConsumer(
        cast(Cluster, OneTopic()), settings, schemas, cast(Decoder, schemas), lake
    )
    assert consumer.refresh_topics()
    consumer._take(Record(topic, 0, 0, 1_000, b"k", value, {}))
    (letter,) = (codec.decode(v) for v in sent)
    assert isinstance(letter, records.DeadLetter)
    assert (letter.value, letter.process, letter.reason) == (value, "lake", "invalid")
    assert "MORE_FIELDS" in letter.detail and not consumer.rows["rewards"]
