"""Records with trace contexts: calls, their trajectories, what became of them, and a version."""

from __future__ import annotations

from typing import Any

from clawstream.schemas import records
from clawstream.schemas.ids import TraceContext
from clawstream.schemas.records import (
    BatchGroup,
    BatchMember,
    Candidate,
    CandidateStep,
    FailedCall,
    Place,
    ReadyBatch,
    Refused,
    RewardValue,
    Step,
    Usage,
    VersionSpan,
    WeightVersion,
    WorkerStatus,
)

RUN = "run"
AT = 1_700_000_000_000
"""Milliseconds at which everything begins."""


def traceparent(number: int, flags: int = 1) -> str:
    """Return the trace context of a client's span."""
    return TraceContext(f"{number + 1:032x}", f"{number + 1:016x}", flags).header


def step(key: str, call: str = "C0", choice: int = 0, **more: Any) -> Step:
    plain: dict[str, Any] = {
        "step_id": f"{key}~{call}.{choice}", "run_id": RUN, "trajectory_key": key,
        "call_id": f"{key}~{call}", "choice_index": choice, "group_id": "g", "channel": "train",
        "protocol": "openai.chat", "model": "policy", "status": "ok", "finish_reason": "stop",
        "streamed": True, "request_json": b"{}", "response_json": b"{}", "gateway_id": "gw",
        "worker_id": "w0", "received_at": AT * 1000, "finished_at": AT * 1000 + 250_000,
        "time_to_first_token_ms": 40.0,
        "versions": (VersionSpan(version="run/3.0", start=0, end=2),),
        "usage": Usage(prompt_tokens=11, completion_tokens=5, cached_tokens=4),
    }  # fmt: skip
    return Step(**{**plain, **more})


def failed_call(key: str | None, **more: Any) -> FailedCall:
    plain: dict[str, Any] = {
        "event_id": f"{key}~F0", "run_id": RUN, "trajectory_key": key, "protocol": "openai.chat",
        "model": "policy", "streamed": False, "source": "engine", "status": 429,
        "message": "slow down", "gateway_id": "gw", "received_at": AT * 1000, "duration_ms": 12.5,
    }  # fmt: skip
    return FailedCall(**{**plain, **more})


def reward(value: float = 0.5) -> RewardValue:
    return RewardValue(
        source="rule", name="exact", function_version="1", value=value, reward_revision=0
    )


def candidate(key: str, revision: int = 0, **more: Any) -> Candidate:
    only = CandidateStep(step_id=f"{key}~C0.0", index=0, response_tokens=5, trainable=True)
    plain: dict[str, Any] = {
        "run_id": RUN, "channel": "train", "trajectory_key": key, "trajectory_id": key,
        "group_id": "g", "revision": revision, "outcome": "completed", "opened_at": AT,
        "closed_at": AT + 1000, "rewards": (reward(),) if revision else (), "steps": (only,),
        "prompt_tokens": 11, "trainable_tokens": 5, "trainable": True,
    }  # fmt: skip
    return Candidate(**{**plain, **more})


def member(key: str, context: str | None) -> BatchMember:
    place = Place(topic_id="tt", partition=0, first_offset=0, last_offset=0)
    return BatchMember(
        trajectory_id=key, trajectory_key=key, revision=1, place=place, rewards=(reward(),),
        untrainable_steps=(), trainable_tokens=5, traceparent=context,
    )  # fmt: skip


def batch(seq: int, *members: BatchMember) -> ReadyBatch:
    group = BatchGroup(group_id="g", round=0, n=len(members), members=members)
    return ReadyBatch(
        run_id=RUN, channel="train", batch_seq=seq, groups=(group,), policy_version=1,
        sync_every=1, algorithm="grpo", reward_weights={}, input_topic_id="c", input_partition=0,
        input_from=0, input_to=1, content_hash="h", trainable_tokens=5 * len(members),
        created_at_event_time=AT + 2000,
    )  # fmt: skip


def refused(*of: tuple[str, str | None]) -> Refused:
    contexts = tuple(context for _, context in of)
    return Refused(
        run_id=RUN, channel="train", group_id="g", round=1, n=len(of), whole_group=True,
        trajectory_ids=tuple(key for key, _ in of), revisions=(0,) * len(of),
        reason="zero_variance", detail="all 1", input_topic_id="c", input_from=0, input_to=1,
        event_time=AT + 2000, traceparents=contexts if any(contexts) else (),
    )  # fmt: skip


def version(sync: int, topic_id: str | None, first: int | None, last: int | None) -> WeightVersion:
    return WeightVersion(
        version_id=f"{RUN}/{sync}.0", run_id=RUN, sync_index=sync, attempt=0, format="full",
        files=(), channel="train", parent_version=f"{RUN}/{sync - 1}.0" if sync else None,
        batches_topic_id=topic_id, first_batch_seq=first, last_batch_seq=last,
        metrics={"train_seconds": 1.5, "save_seconds": 0.5, "loss": 1.0},
        created_at=(AT + 9000) * 1000,
    )  # fmt: skip


def worker(version_id: str | None, heartbeat: int, **more: Any) -> WorkerStatus:
    plain: dict[str, Any] = {
        "worker_id": "w0", "base_url": "http://w0", "models": (), "state": "ready",
        "weight_version": version_id, "run_id": RUN, "heartbeat_at": heartbeat,
        "heartbeat_interval_ms": 1000, "started_at": 0, "loads": 1, "last_load_ms": 300.0,
        "loaded_at": (AT + 9800) * 1000,
    }  # fmt: skip
    return records.WorkerStatus(**{**plain, **more})
