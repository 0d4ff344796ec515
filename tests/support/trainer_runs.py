"""Runs of the trainer on a weights log in memory; a batch depends on its number alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from clawstream.runtime.kafka import Fenced, Record
from clawstream.schemas.ids import parse_version
from clawstream.schemas.records import (
    BatchGroup,
    BatchMember,
    Place,
    ReadyBatch,
    RewardValue,
    Segment,
    TrainedTokens,
    TrainedTrajectory,
    Trajectory,
    TrajectoryStep,
    WeightVersion,
)
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import pack_ids, pack_logprobs
from clawstream.trainer.data.batches import FetchedBatch
from clawstream.trainer.data.sequences import ReadableIds
from clawstream.trainer.position import Position, start_of
from clawstream.trainer.run import Run
from clawstream.trainer.start import open_run
from clawstream.trainer.step import train_batch
from clawstream.trainer.versions.weight_log import Trained

GROUPS, MEMBERS = 2, 3
ANY_ID = ReadableIds(2**31 - 1)


@dataclass
class MemoryWeightLog:
    """A weights log in memory."""

    topic_id: str = "memory"
    published: list[WeightVersion] = field(default_factory=list)
    trained: list[TrainedTokens] = field(default_factory=list)
    decided: list[TrainedTrajectory] = field(default_factory=list)
    dead_letters: list[tuple[int, str, str]] = field(default_factory=list)
    """Offset, reason and detail."""
    fenced: bool = False

    def publish(self, version: WeightVersion, trained: Sequence[Trained]) -> None:
        self.raise_if_fenced()
        self.published.append(version)
        self.trained += [one for one in trained if isinstance(one, TrainedTokens)]
        self.decided += [one for one in trained if isinstance(one, TrainedTrajectory)]

    def dead_letter(self, record: Record, topic_id: str, reason: str, detail: str) -> None:
        self.raise_if_fenced()
        self.dead_letters.append((record.offset, reason, detail))

    def raise_if_fenced(self) -> None:
        if self.fenced:
            raise Fenced("a newer weight_log was opened")


def settings(
    data_dir: Path, model_dir: Path, *, sync_every: int = 1, **trainer: object
) -> Settings:
    return Settings.model_validate(
        {
            "run_id": "r",
            "data_dir": data_dir,
            "trainer": {"model_path": model_dir, "device": "cpu", "lr": 1e-3, **trainer},
            "admit": {"policy": {"sync_every": sync_every}},
        }
    )


def locate(topic_id: str, stored: Position | None) -> Position:
    """As the source does it."""
    return (
        stored
        if stored is not None and stored.topic_id == topic_id
        else start_of("batches", topic_id, stored)
    )


def begin(s: Settings, weight_log: MemoryWeightLog, topic_id: str = "topic") -> Run:
    taken = {
        v for record in weight_log.published if (v := parse_version(record.version_id)) is not None
    }
    return open_run(
        s, weight_log, weight_log.published, taken, lambda stored: locate(topic_id, stored)
    )


def fetched(seq: int, topic_id: str = "topic") -> FetchedBatch:
    """A batch that depends on its number alone."""
    groups, trajectories = [], {}
    for g in range(GROUPS):
        members = []
        for m in range(MEMBERS):
            name = f"t{seq}-{g}-{m}"
            value = float((seq + g + m) % 3)
            reward = RewardValue(
                source="rule", name="r", function_version="1", value=value, reward_revision=0
            )
            ids = [(seq * 7 + g * 5 + m * 3 + k) % 20 + 8 for k in range(4)]
            step = TrajectoryStep(
                step_id=f"{name}~1.0",
                index=0,
                segment=1,
                status="ok",
                drift="root",
                prompt_tokens=3,
                response_tokens=4,
                response_json=b"{}",
                oldest_version="r/0.0",
                newest_version="r/0.0",
                trainable=True,
                offset=0,
            )
            said = Segment(
                parent=0, step_index=0, token_ids=pack_ids(ids), logprobs=pack_logprobs([-3.0] * 4)
            )
            trajectories[name] = Trajectory(
                run_id="r",
                trajectory_key=name,
                trajectory_id=name,
                group_id=f"g{g}",
                channel="train",
                outcome="completed",
                opened_at=0,
                closed_at=1,
                part=0,
                parts=1,
                segments=(Segment(token_ids=pack_ids([2, 5, 9])), said),
                steps=(step,),
            )
            members.append(
                BatchMember(
                    trajectory_id=name,
                    trajectory_key=name,
                    revision=0,
                    rewards=(reward,),
                    untrainable_steps=(),
                    trainable_tokens=4,
                    place=Place(topic_id="p", partition=0, first_offset=0, last_offset=0),
                )
            )
        groups.append(BatchGroup(group_id=f"g{g}", round=seq, n=MEMBERS, members=tuple(members)))
    batch = ReadyBatch(
        run_id="r",
        channel="train",
        batch_seq=seq,
        groups=tuple(groups),
        policy_version=0,
        sync_every=1,
        algorithm="cispo",
        reward_weights={},
        input_topic_id="c",
        input_partition=0,
        input_from=0,
        input_to=0,
        content_hash="",
        trainable_tokens=24,
        created_at_event_time=0,
    )
    position = Position(topic_id=topic_id, next_offset=2 * seq + 2, next_batch_seq=seq + 1)
    return FetchedBatch(
        batch=batch,
        record=record_of(position),
        trajectories=trajectories,
        position=position,
        read_seconds=0.0,
    )


def record_of(position: Position) -> Record:
    """Return the record of the batch before a position, without its bytes."""
    return Record("batches", 0, position.next_offset - 1, 0, b"r", None, {})


def add_turn_with_images(
    given: FetchedBatch, name: str, placeholders: Sequence[int], *images: bytes
) -> None:
    """Give a trajectory a second turn of two sampled tokens, whose prompt begins with images."""
    trajectory = given.trajectories[name]
    (step,) = trajectory.steps
    digests = tuple(sha256(image).hexdigest() for image in images)
    later = replace(step, step_id=f"{name}~2.0", index=1, parent=0, segment=3, images=digests)
    environment = Segment(parent=1, token_ids=pack_ids([*placeholders, 4]))
    said = Segment(
        parent=2, step_index=1, token_ids=pack_ids([6, 7]), logprobs=pack_logprobs([-1.0, -2.0])
    )
    segments = (*trajectory.segments, environment, said)
    given.trajectories[name] = replace(trajectory, steps=(step, later), segments=segments)


def go(run: Run, first: int, last: int) -> None:
    for seq in range(first, last + 1):
        assert run.position.next_batch_seq == seq
        train_batch(run, fetched(seq, run.position.topic_id))
        if run.version_due:
            run.publish()
    run._checkpoints.wait()


def ids(weight_log: MemoryWeightLog) -> list[str]:
    return [v.version_id.removeprefix("r/") for v in weight_log.published]


def weights_sha(version: WeightVersion) -> str:
    return next(f.sha256 for f in version.files if f.url.endswith("model.safetensors"))


def batches(versions: list[WeightVersion]) -> list[tuple[int | None, int | None]]:
    return [(v.first_batch_seq, v.last_batch_seq) for v in versions]
