"""A partition of assemble in memory, for tests: records of a test run in, outputs out. A crash is a
method call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.conversation import texts_of
from clawstream.schemas.ids import key_of_trajectory
from clawstream.schemas.records import (
    Assessment,
    Candidate,
    Curation,
    FailedCall,
    Reward,
    SessionEvent,
    Step,
    Trajectory,
)
from clawstream.schemas.records.trajectory_parts import joined
from clawstream.schemas.tokens import pack_ids, pack_logprobs
from clawstream.stream_jobs.assemble import changelog
from clawstream.stream_jobs.assemble.changelog import ChangelogReader
from clawstream.stream_jobs.assemble.fold import AssemblyFold
from clawstream.stream_jobs.assemble.limits import Limits
from clawstream.stream_jobs.assemble.output_records import assembled, candidate
from clawstream.stream_jobs.assemble.payload.cache import CachedPayload
from clawstream.stream_jobs.assemble.state.changes import OutputsAcknowledged, PayloadWritten
from clawstream.stream_jobs.assemble.state.partition_state import PartitionState
from clawstream.stream_jobs.assemble.state.trajectories import (
    DeadLetterDecision,
    SourceTopic,
    StepMarkDecision,
)

CODEC = Codec()
LIMITS = Limits(
    trajectory_timeout=1000, closed_horizon=1_000_000, orphan_after=500, closed_max=10_000
)


ANONYMOUS_KEY = "anonymous-" + "0" * 32


def step(
    key: str, n: int, prompt: Sequence[int] = (1,), response: Sequence[int] = (2,), **more: Any
) -> Step:
    """Create step C<n>.0 of a trajectory key. more: any field."""
    given: dict[str, Any] = {
        "step_id": f"{key}~C{n}.0",
        "run_id": "r",
        "trajectory_key": key,
        "call_id": f"{key}~C{n}",
        "choice_index": 0,
        "protocol": "openai.chat",
        "model": "policy",
        "status": "ok",
        "streamed": False,
        "request_json": b"{}",
        "response_json": b'{"content":"x"}',
        "prompt_token_ids": pack_ids(prompt),
        "response_token_ids": pack_ids(response),
        "response_logprobs": pack_logprobs([-0.5] * len(response)),
        "version_first": "r/3.0",
        "version_last": "r/3.0",
        "gateway_id": "g",
        "received_at": 0,
        "finished_at": 0,
    }
    return Step(**(given | more))


def chat_step(
    n: int,
    messages: Sequence[Mapping[str, Any]],
    reply: Mapping[str, Any],
    key: str = ANONYMOUS_KEY,
    tokens: bool = True,
    **more: Any,
) -> Step:
    """Create step C<n>.0 of a chat. Its tokens are the characters of the messages, so unchanged
    messages are a prefix.
    """
    message = {"role": "assistant", **reply}
    given: dict[str, Any] = {
        "request_json": orjson.dumps({"messages": messages}),
        "response_json": orjson.dumps(message),
        **(
            {}
            if tokens
            else {"prompt_token_ids": None, "response_token_ids": None, "response_logprobs": None}
        ),
    }
    return step(
        key, n, _ids(*messages, {"role": "assistant"})[:-1], _ids(message)[1:], **(given | more)
    )


def _ids(*messages: Mapping[str, Any]) -> list[int]:
    """Return role, text, calls and an end token of each message."""
    ids: list[int] = []
    for message in messages:
        calls = [
            (c["function"]["name"], c["function"]["arguments"])
            for c in message.get("tool_calls") or ()
        ]
        ids += [
            1000 + len(message["role"]),
            *map(ord, "".join(texts_of(message))),
            *map(ord, str(calls or "")),
            2000,
        ]
    return ids


def session(key: str, kind: Any, event_id: str = "", **more: Any) -> SessionEvent:
    """A session event."""
    return SessionEvent(
        event_id=event_id or f"{key}-{kind}",
        run_id="r",
        trajectory_key=key,
        kind=kind,
        created_at=0,
        **more,
    )


def failed_call(key: str | None, n: int = 0, **more: Any) -> FailedCall:
    """Create a call that an engine answered with 500. more: any field."""
    given: dict[str, Any] = {
        "event_id": f"{key}~F{n}",
        "run_id": "r",
        "trajectory_key": key,
        "protocol": "openai.chat",
        "streamed": False,
        "source": "engine",
        "status": 500,
        "message": "out of memory",
        "gateway_id": "g",
        "received_at": 0,
        "duration_ms": 1.5,
    }
    return FailedCall(**(given | more))


def reward(
    key: str, value: float | None = 1.0, n: int | None = None, name: str = "a", revision: int = 0
) -> Reward:
    """Create a reward of the trajectory, or of its step C<n>.0."""
    return Reward(
        event_id=f"{key}-{name}-{n}-{revision}-{value}",
        run_id="r",
        trajectory_key=key,
        source="env",
        name=name,
        function_version="1",
        value=value,
        reward_revision=revision,
        created_at=0,
        step_id=f"{key}~C{n}.0" if n is not None else None,
    )


def curation(key: str, event_id: str, n: int | None = None, **fields: Any) -> Curation:
    """Create a curation of the trajectory, or of its step C<n>.0."""
    return Curation(
        event_id=event_id,
        run_id="r",
        trajectory_key=key,
        by="me",
        created_at=0,
        step_id=f"{key}~C{n}.0" if n is not None else None,
        **fields,
    )


def assessment(key: str, quality: float | None, *steps: float, revision: int = 1) -> Assessment:
    """Create an assessment of a trajectory and of its steps, by index."""
    return Assessment(
        event_id=f"{key}-assessed-{revision}",
        run_id="r",
        trajectory_key=key_of_trajectory(key),
        trajectory_id=key,
        rules=("length@1",),
        quality=quality,
        step_quality=steps,
        findings=(),
        assessment_revision=revision,
        created_at=0,
    )


@dataclass
class InMemoryPartition:
    """A partition processor without Kafka: folds records, appends deltas to a list, and collects
    the outputs.
    """

    limits: Limits = LIMITS
    state: PartitionState = field(default_factory=PartitionState)
    log: list[bytes] = field(default_factory=list)
    payload: dict[int, CachedPayload] = field(default_factory=dict)
    trajectories: dict[str, Trajectory] = field(default_factory=dict)
    candidates: dict[tuple[str, int], Candidate] = field(default_factory=dict)
    marks: list[StepMarkDecision] = field(default_factory=list)
    dead_letters: list[DeadLetterDecision] = field(default_factory=list)
    seq: int = 0
    next: list[int] = field(default_factory=lambda: [0, 0])
    unflushed: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fold = AssemblyFold(self.state, self.limits)

    def feed(self, *records: tuple[SourceTopic, int, Any]) -> InMemoryPartition:
        """Process one batch of (source, timestamp, event); assigns offsets in order."""
        return self.batch([(s, self._offset(s), t, e) for s, t, e in records])

    def _offset(self, source: SourceTopic) -> int:
        self.next[source] += 1
        return self.next[source] - 1

    def batch(self, records: Sequence[tuple[SourceTopic, int, int, Any]]) -> InMemoryPartition:
        """Fold a batch and emit its outputs."""
        self.decide(records)
        self.emit()
        return self

    def decide(self, records: Sequence[tuple[SourceTopic, int, int, Any]]) -> None:
        """Fold a batch and make it durable."""
        for source, offset, timestamp, event in records:
            key = (getattr(event, "trajectory_key", None) or "").encode()
            kept = self.fold.record(source, offset, timestamp, key, event)
            if kept is not None:
                self.payload[offset] = kept
        entries = self.fold.finish_batch()
        if entries or self.unflushed:
            self.seq += 1
            self.log.append(
                CODEC.encode(changelog.delta(0, self.seq, self.state, [*self.unflushed, *entries]))
            )
            self.unflushed = []

    def emit(self) -> None:
        """Emit outputs that are decided and not acknowledged."""
        facts = []
        for key, trajectory in self.state.pending.closings.items():
            done = assembled(key, trajectory, self.state.closed[key], self.payload)
            whole = joined(done.parts)
            assert self.trajectories.setdefault(key[1], whole) == whole, (
                "sent again with other content"
            )
            facts.append(PayloadWritten(key, done.prompt_tokens, done.order, ("id", 0, 0, 0)))
            facts[-1].apply(self.state)
        for key in self.state.pending.revised:
            made, _ = candidate(key, self.state.closed[key], CODEC)
            assert self.candidates.setdefault((key[1], made.revision), made) == made, (
                "sent again with other content"
            )
        self.marks += self.state.pending.marks
        self.dead_letters += self.state.pending.dead_letters
        if self.state.pending:
            acknowledged = OutputsAcknowledged()
            acknowledged.apply(self.state)
            self.unflushed = [acknowledged, *facts]

    def snapshot(self) -> None:
        """Append a snapshot to the changelog."""
        self.log += [CODEC.encode(p) for p in changelog.snapshot(0, self.seq, self.state)]
        self.unflushed = []

    def crash(self) -> None:
        """Lose everything except the changelog, the payload (it is on `claw.steps`) and the
        outputs; restart from the changelog.
        """
        log = ChangelogReader()
        for offset, value in enumerate(self.log, 1):  # behind a marker
            log.read(offset, CODEC.decode(value), len(value))
        self.state, self.seq, self.unflushed = log.state, log.seq, []
        self.fold = AssemblyFold(self.state, self.limits)
        self.emit()

    def last(self, key: str) -> Candidate:
        """Return the last candidate of a trajectory id."""
        return self.candidates[max(k for k in self.candidates if k[0] == key)]


def content(w: InMemoryPartition) -> tuple[dict[str, Trajectory], dict[str, Candidate]]:
    """Return what must not depend on interleaving, duplicates or crashes: trajectories without
    offsets, last candidates without revision.
    """
    trajectories = {
        k: replace(t, steps=tuple(replace(s, offset=0) for s in t.steps))
        for k, t in w.trajectories.items()
    }
    return trajectories, {k: replace(w.last(k), revision=0) for k in trajectories}
