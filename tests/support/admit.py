"""Short helpers for admission tests: a policy, candidates, a log of them, and the decisions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from clawstream.schemas.records import (
    AdmissionPolicy,
    Candidate,
    CandidateStep,
    Channel,
    Place,
    PolicyApplied,
    ReadyBatch,
    Refused,
    RewardValue,
    Tick,
)
from clawstream.stream_jobs.admit.decisions.journal import CandidateLog, Decision, InputRecord
from clawstream.stream_jobs.admit.decisions.state import ResumePoint
from clawstream.stream_jobs.admit.fold import AdmissionFold

SOURCE = CandidateLog("topic-1", 2, 1)


def policy(**changes: Any) -> AdmissionPolicy:
    plain: dict[str, Any] = {
        "run_id": "r", "policy_version": 1, "group_size": 2, "min_members": 2,
        "required_rewards": ("rule",), "reward_weights": {}, "reward_deadline_ms": 1000,
        "group_deadline_ms": 5000, "max_staleness": None, "drop_zero_variance": True,
        "min_trainable_tokens": 1, "train_outcomes": ("completed", "failed"), "batch_groups": 1,
        "sync_every": 1, "val_groups": 2, "val_deadline_ms": 3000, "algorithm": "grpo",
        "created_at": 0,
    }  # fmt: skip
    return AdmissionPolicy(**{**plain, **changes})


def reward(value: float | None, source: Any = "rule", name: str = "exact") -> RewardValue:
    return RewardValue(
        source=source, name=name, function_version="1", value=value, reward_revision=0
    )


def cand(tid: str, group: str = "g", value: float | None = 1.0, **changes: Any) -> Candidate:
    """Return a usable candidate.

    `rewards=()` gives it no reward yet; `value=None` is an explicit no_reward.
    """
    plain: dict[str, Any] = {
        "run_id": "r", "channel": "train", "trajectory_key": tid, "trajectory_id": tid,
        "group_id": group, "revision": 0, "outcome": "completed", "opened_at": 0, "closed_at": 10,
        "rewards": (reward(value),),
        "steps": (CandidateStep(step_id=f"{tid}~1.0", index=0, response_tokens=5, trainable=True),),
        "prompt_tokens": 7, "trainable_tokens": 5, "oldest_sync_index": 0, "newest_sync_index": 0,
        "trainable": True,
    }  # fmt: skip
    return Candidate(**{**plain, **changes})


def tick(event_time: int, partition: int = 0) -> Tick:
    return Tick(partition=partition, event_time=event_time)


def refused(group: str, n: int = 2, reason: str = "zero_variance", **changes: Any) -> Refused:
    plain: dict[str, Any] = {
        "run_id": "r", "channel": "train", "group_id": group, "round": 0, "trajectory_ids": (),
        "revisions": (),
        "whole_group": n > 0, "reason": reason, "n": n, "input_topic_id": "topic-1",
        "input_from": 0, "input_to": 0,
    }  # fmt: skip
    return Refused(**{**plain, **changes})


def entries(*events: Any) -> list[InputRecord]:
    return [
        InputRecord(i, e, Place(topic_id="t", partition=0, first_offset=i, last_offset=i))
        for i, e in enumerate(events)
    ]


def fold(*events: Any, channel: Any = "train", source: CandidateLog = SOURCE) -> list[Decision]:
    """Return all decisions except the first policy's."""
    state = AdmissionFold("r", channel, source)
    out = [d for e in entries(*events) for d in state.fold(e)]
    return out[1:] if out and isinstance(out[0], PolicyApplied) else out


def groups(decisions: list[Decision]) -> list[list[list[str]]]:
    """Return trajectory ids by batch and group."""
    return [
        [[m.trajectory_id for m in g.members] for g in d.groups]
        for d in decisions
        if isinstance(d, ReadyBatch)
    ]


def refusals(decisions: list[Decision]) -> list[tuple[str, tuple[str, ...], bool]]:
    return [
        (d.reason, d.trajectory_ids, d.whole_group) for d in decisions if isinstance(d, Refused)
    ]


def replay(
    records: Iterable[InputRecord],
    policy: AdmissionPolicy,
    channel: Channel = "train",
    tickers: int = 12,
) -> list[str]:
    """Return the content hashes of the batches under one policy, ignoring policies in the log."""
    fold = AdmissionFold(
        policy.run_id, channel, CandidateLog("replay", 0, tickers), ResumePoint(policy=policy)
    )
    kept = (e for e in records if not isinstance(e.event, AdmissionPolicy))
    return [d.content_hash for e in kept for d in fold.fold(e) if isinstance(d, ReadyBatch)]
