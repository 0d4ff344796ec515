"""Any float, any text and any size in recorded values, through the folds of the jobs, the tables of
the lake and the estimators of the trainer: lists in, lists out, and nothing raises.

`tests/e2e/test_hostile_values.py` does the same with real processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from support.admit import policy
from support.assemble import InMemoryPartition
from support.hostile import Hostile, recordable

from clawstream.runtime.kafka import Record
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.algorithms import ALGORITHMS
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import (
    Assessment,
    Curation,
    Place,
    ReadyBatch,
    Reward,
    Tick,
    Trajectory,
)
from clawstream.stream_jobs.admit.group import Group, Member, evaluate_group, to_batch_group
from clawstream.stream_jobs.assemble.state.trajectories import REWARDS, STEPS
from clawstream.stream_jobs.lake.table_writer import storable_rows
from clawstream.stream_jobs.lake.tables.catalog import catalog
from clawstream.stream_jobs.lake.tables.row_decoder import RowDecoder, WriterSchemas
from clawstream.trainer.algorithms.registry import load
from clawstream.trainer.data.environments import by_environment
from clawstream.trainer.data.sequences import ReadableIds, sequences_of_batch, tokens_by_version
from clawstream.trainer.data.view import batch_view, with_advantages
from clawstream.trainer.metrics.statistics import staleness

CODEC = Codec()
RUN = "r"


class Tables:
    """The tables of the lake, without files."""

    def __init__(self) -> None:
        schemas = WriterSchemas()
        self.rejected: list[str] = []
        self._rows_of = RowDecoder(
            schemas,
            cast(Decoder, schemas),
            catalog(),
            lambda wider: False,
            lambda record, why: self.rejected.append(why),
        )

    def take(self, event: Any) -> None:
        """Convert a record to the columns of its tables."""
        value = CODEC.encode(event)
        _, found = self._rows_of(Record("t", 0, 0, 0, b"k", value, {}), "T", tuple(catalog()))
        for table, rows in found:
            storable_rows(catalog()[table], rows, lambda row, why: self.rejected.append(why))


def batches_of(assembled: InMemoryPartition) -> Iterable[ReadyBatch]:
    """Yield a batch for each group that admission would take."""
    asked = policy(
        run_id=RUN, required_rewards=(), drop_zero_variance=False, max_staleness=None,
        train_outcomes=("completed", "failed", "timed_out"),
    )  # fmt: skip
    newest = {c.trajectory_id: c for _, c in sorted(assembled.candidates.items())}
    groups: dict[str, Group] = {}
    for candidate in newest.values():
        group = groups.setdefault(candidate.group_id, Group((candidate.group_id, 0), 2))
        place = Place(topic_id="T", partition=0, first_offset=0, last_offset=0)
        member = Member(candidate, place, 0)
        member.apply_policy(asked)
        group.put(member)
    for group in groups.values():
        verdict = evaluate_group(group, asked, "train", None, ended=True)
        if verdict is not None and verdict.refusal is None:
            batch = ReadyBatch(
                run_id=RUN, channel="train", batch_seq=0, policy_version=1, sync_every=1,
                groups=(to_batch_group(group, verdict.usable),), algorithm="grpo",
                reward_weights={}, input_topic_id="c", input_partition=0, input_from=0, input_to=1,
                content_hash="", trainable_tokens=1, created_at_event_time=0,
            )  # fmt: skip
            yield cast(ReadyBatch, CODEC.decode(CODEC.encode(batch)))


def estimate(batch: ReadyBatch, trajectories: Mapping[str, Trajectory], name: str) -> int:
    """Return how many tokens of a batch have an advantage."""
    algorithm = load(name, {}, [])
    by_environment(batch, trajectories, ["e"])
    data = sequences_of_batch(
        batch, trajectories, algorithm.smallest_group, algorithm.rewards, ReadableIds(300)
    )
    staleness(tokens_by_version(data.sequences), RUN, 0)
    zeros = [np.zeros(s.trained_tokens, np.float32) for s in data.sequences]
    sequences = [
        replace(s, values=z, ref_logprobs=z, teacher_logprobs=z)
        for s, z in zip(data.sequences, zeros, strict=True)
    ]
    view = batch_view(sequences, data.members, RUN, 0)
    found = with_advantages(sequences, algorithm.advantage(view, algorithm.settings))
    for sequence in found:
        assert sequence.advantages is not None and np.isfinite(sequence.advantages).all()
    return sum(sequence.trained_tokens for sequence in found)


@pytest.mark.slow
def test_hostile_values_raise_nowhere() -> None:
    tables, trained = Tables(), dict.fromkeys(ALGORITHMS, 0)
    for seed in range(25):
        hostile, assembled = Hostile(seed, RUN), InMemoryPartition()
        events = [e for member in range(2) for e in hostile.member(f"g{seed}", member, 2)]
        log = [CODEC.decode(CODEC.encode(e)) for e in events if recordable(CODEC, e)]
        assembled.feed(
            *[
                (REWARDS if isinstance(e, Reward | Curation | Assessment) else STEPS, i, e)
                for i, e in enumerate(log)
            ]
        )
        assembled.feed(*[(source, 10_000_000, Tick(partition=0)) for source in (STEPS, REWARDS)])
        for event in (*log, *assembled.candidates.values(), *assembled.trajectories.values()):
            tables.take(event)
        for batch in batches_of(assembled):
            tables.take(batch)
            for name in ALGORITHMS:
                trained[name] += estimate(batch, assembled.trajectories, name)
    assert min(trained.values()) > 0
