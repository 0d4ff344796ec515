"""Ready batches made from sampled replies, and a weights log in memory, for runs without Kafka."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from clawstream.runtime.kafka import Record
from clawstream.schemas.records import (
    BatchGroup,
    BatchMember,
    Place,
    ReadyBatch,
    RewardValue,
    Segment,
    Trajectory,
    TrajectoryStep,
    WeightVersion,
)
from clawstream.schemas.tokens import pack_ids, pack_logprobs
from clawstream.trainer.data.batches import FetchedBatch
from clawstream.trainer.position import Position
from clawstream.trainer.versions.weight_log import Trained

RUN = "r"


@dataclass
class MemoryWeightLog:
    """A weights log in memory."""

    topic_id: str = "memory"
    published: list[WeightVersion] = field(default_factory=list)

    def publish(self, version: WeightVersion, trained: Sequence[Trained]) -> None:
        self.published.append(version)

    def dead_letter(self, record: Record, topic_id: str, reason: str, detail: str) -> None:
        raise AssertionError(detail)

    def raise_if_fenced(self) -> None:
        pass


@dataclass(frozen=True)
class Reply:
    """A sampled reply. logprobs: of its tokens. version: id of the weights that sampled it."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    reward: float
    version: str


def batch_of(groups: Sequence[Sequence[Reply]], algorithm: str, seq: int) -> FetchedBatch:
    """Return batch number `seq` of run RUN: each reply is a trajectory of one step."""
    named = [
        [(f"t{seq}-{g}-{m}", reply) for m, reply in enumerate(group)]
        for g, group in enumerate(groups)
    ]
    batch = ReadyBatch(
        run_id=RUN,
        channel="train",
        batch_seq=seq,
        groups=tuple(
            BatchGroup(
                group_id=f"g{seq}-{g}",
                round=seq,
                n=len(group),
                members=tuple(_member(name, reply) for name, reply in group),
            )
            for g, group in enumerate(named)
        ),
        policy_version=seq,
        sync_every=1,
        algorithm=algorithm,
        reward_weights={},
        input_topic_id="c",
        input_partition=0,
        input_from=0,
        input_to=0,
        content_hash="",
        trainable_tokens=sum(len(reply.tokens) for group in groups for reply in group),
        created_at_event_time=0,
    )
    return FetchedBatch(
        batch=batch,
        record=Record("batches", 0, seq, 0, RUN.encode(), None, {}),
        trajectories={name: _trajectory(name, reply) for group in named for name, reply in group},
        position=Position(topic_id="t", next_offset=seq + 1, next_batch_seq=seq + 1),
        read_seconds=0.0,
    )


def start(_: Position | None) -> Position:
    """Return the position of the first batch, for `open_run`."""
    return Position(topic_id="t", next_offset=0, next_batch_seq=0)


def resume(stored: Position | None) -> Position:
    """Return the stored position, for `open_run`."""
    return stored or start(None)


def _member(name: str, reply: Reply) -> BatchMember:
    reward = RewardValue(
        source="rule", name="score", function_version="1", value=reply.reward, reward_revision=0
    )
    return BatchMember(
        trajectory_id=name,
        trajectory_key=name,
        revision=0,
        rewards=(reward,),
        untrainable_steps=(),
        trainable_tokens=len(reply.tokens),
        place=Place(topic_id="p", partition=0, first_offset=0, last_offset=0),
    )


def _trajectory(name: str, reply: Reply) -> Trajectory:
    step = TrajectoryStep(
        step_id=f"{name}~0.0",
        index=0,
        segment=1,
        status="ok",
        drift="root",
        prompt_tokens=len(reply.prompt),
        response_tokens=len(reply.tokens),
        response_json=b"{}",
        oldest_version=reply.version,
        newest_version=reply.version,
        trainable=True,
        offset=0,
        logprobs_temperature=1.0,
    )
    said = Segment(
        parent=0,
        step_index=0,
        token_ids=pack_ids(list(reply.tokens)),
        logprobs=pack_logprobs(list(reply.logprobs)),
    )
    return Trajectory(
        run_id=RUN,
        trajectory_key=name,
        trajectory_id=name,
        group_id=name.rpartition("-")[0],
        channel="train",
        outcome="completed",
        opened_at=0,
        closed_at=1,
        part=0,
        parts=1,
        segments=(Segment(token_ids=pack_ids(list(reply.prompt))), said),
        steps=(step,),
    )
