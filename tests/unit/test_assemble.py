"""The fold of assemble: lists in, lists out; a crash is a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.codec import Codec
from schemas.events import (
    AssemblyMarker,
    Candidate,
    Curation,
    Reward,
    SessionEvent,
    Step,
    Tag,
    Tick,
    Trajectory,
    VersionSpan,
)
from schemas.parts import joined
from schemas.tokens import pack_ids, pack_logprobs
from stream_jobs import assembly as op
from stream_jobs import state_log
from stream_jobs.assemble import Fold
from stream_jobs.errors import UnreadableStateLog
from stream_jobs.assembly import Assembly
from stream_jobs.index import REWARDS, STEPS, Burial, Closed, Mark, Source
from stream_jobs.judge import Bad, Limits
from stream_jobs.payload import Kept
from stream_jobs.state_log import StateLog
from stream_jobs.trajectory import assembled, candidate

CODEC = Codec()
LIMITS = Limits(trajectory_timeout=1000, closed_horizon=1_000_000, orphan_after=500, closed_max=10_000)


def step(key: str, n: int, prompt: Sequence[int] = (1,), response: Sequence[int] = (2,), **more: Any) -> Step:
    given: dict[str, Any] = {
        "step_id": f"{key}~C{n}.0", "run_id": "r", "trajectory_key": key, "call_id": f"{key}~C{n}", "choice_index": 0,
        "protocol": "openai.chat", "model": "policy", "status": "ok", "streamed": False, "request_json": b"{}",
        "response_json": b'{"content":"x"}', "prompt_token_ids": pack_ids(prompt), "response_token_ids": pack_ids(response),
        "response_logprobs": pack_logprobs([-0.5] * len(response)), "version_first": "r/3.0", "version_last": "r/3.0",
        "gateway_id": "g", "received_at": 0, "finished_at": 0,
    }  # fmt: skip
    return Step(**(given | more))


def session(key: str, kind: Any, event_id: str = "", **more: Any) -> SessionEvent:
    return SessionEvent(
        event_id=event_id or f"{key}-{kind}", run_id="r", trajectory_key=key, kind=kind, created_at=0, **more
    )


def reward(key: str, value: float | None = 1.0, n: int | None = None, name: str = "a", revision: int = 0) -> Reward:
    return Reward(
        event_id=f"{key}-{name}-{n}-{revision}-{value}", run_id="r", trajectory_key=key, source="env", name=name,
        function_version="1", value=value, reward_revision=revision, created_at=0, step_id=f"{key}~C{n}.0" if n is not None else None,
    )  # fmt: skip


def curation(key: str, event_id: str, n: int | None = None, **fields: Any) -> Curation:
    return Curation(
        event_id=event_id, run_id="r", trajectory_key=key, by="me", created_at=0,
        step_id=f"{key}~C{n}.0" if n is not None else None, **fields,
    )  # fmt: skip


@dataclass
class Worker:
    """A partition's owner without Kafka: folds, writes deltas to a list, puts out what was decided."""

    limits: Limits = LIMITS
    state: Assembly = field(default_factory=Assembly)
    log: list[bytes] = field(default_factory=list)
    payload: dict[int, Kept] = field(default_factory=dict)
    trajectories: dict[str, Trajectory] = field(default_factory=dict)
    candidates: dict[tuple[str, int], Candidate] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    burials: list[Burial] = field(default_factory=list)
    seq: int = 0
    next: list[int] = field(default_factory=lambda: [0, 0])
    carry: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fold = Fold(self.state, self.limits)

    def feed(self, *records: tuple[Source, int, Any]) -> Worker:
        """One batch of (source, timestamp, event); offsets are given in order."""
        return self.batch([(s, self._offset(s), t, e) for s, t, e in records])

    def _offset(self, source: Source) -> int:
        self.next[source] += 1
        return self.next[source] - 1

    def batch(self, records: Sequence[tuple[Source, int, int, Any]]) -> Worker:
        self.decide(records)
        self.emit()
        return self

    def decide(self, records: Sequence[tuple[Source, int, int, Any]]) -> None:
        for source, offset, timestamp, event in records:
            key = getattr(event, "trajectory_key", "").encode()
            kept = self.fold.record(source, offset, timestamp, key, event)
            if kept is not None:
                self.payload[offset] = kept
        entries = self.fold.seal()
        if entries or self.carry:
            self.seq += 1
            self.log.append(CODEC.encode(state_log.delta(0, self.seq, self.state, [*self.carry, *entries])))
            self.carry = []

    def emit(self) -> None:
        facts = []
        for key, trajectory in self.state.pending.closings.items():
            done = assembled(key, trajectory, Closed.load(self.state.closed[key]), self.payload)
            whole = joined(done.parts)
            assert self.trajectories.setdefault(key[1], whole) == whole, "sent again with other content"
            facts.append([op.FACTS, *key, done.prompt_tokens, done.order, ["id", 0, 0, 0]])
            self.state.apply(facts[-1])
        for key in self.state.pending.revised:
            made = candidate(key, Closed.load(self.state.closed[key]), CODEC)
            assert self.candidates.setdefault((key[1], made.revision), made) == made, "sent again with other content"
        self.marks += self.state.pending.marks
        self.burials += self.state.pending.burials
        if self.state.pending:
            self.state.apply([op.DONE])
            self.carry = [[op.DONE], *facts]

    def snapshot(self) -> None:
        self.log += [CODEC.encode(p) for p in state_log.snapshot(0, self.seq, self.state)]
        self.carry = []

    def crash(self) -> None:
        """Lose everything but the log, the payload (it is on `claw.steps`) and what was put out; start again from the log."""
        log = StateLog()
        for offset, value in enumerate(self.log, 1):  # behind a marker
            log.read(offset, CODEC.decode(value), len(value))
        self.state, self.seq, self.carry = log.state, log.seq, []
        self.fold = Fold(self.state, self.limits)
        self.emit()

    def last(self, key: str) -> Candidate:
        return self.candidates[max(k for k in self.candidates if k[0] == key)]


def test_steps_and_rewards_become_a_trajectory_and_a_candidate() -> None:
    w = Worker().feed(
        (STEPS, 10, session("k", "opened", group_id="g", group_size=4, metadata_json=b'{"gold":1}', channel="val")),
        (STEPS, 11, step("k", 0, [1, 2], [3])),
        (REWARDS, 12, reward("k", 0.5)),
        (STEPS, 13, step("k", 1, [1, 2, 3, 4], [5, 6])),
        (STEPS, 14, session("k", "completed")),
    )
    t = w.trajectories["k"]
    assert (t.group_id, t.group_size, t.channel, t.outcome, t.opened_at, t.closed_at) == (
        "g",
        4,
        "val",
        "completed",
        10,
        14,
    )
    assert t.metadata_json == b'{"gold":1}'
    assert [(s.step_id, s.index, s.parent, s.drift, s.trainable, s.oldest_version) for s in t.steps] == [
        ("k~C0.0", 0, None, "root", True, "r/3.0"), ("k~C1.0", 1, 0, "clean", True, "r/3.0"),
    ]  # fmt: skip
    assert [(s.parent, s.step_index) for s in t.segments] == [(None, None), (0, 0), (1, None), (2, 1)]
    c = w.last("k")
    assert (c.revision, c.prompt_tokens, c.trainable_tokens, c.oldest_sync_index, c.trainable) == (0, 3, 3, 3, True)
    assert [(r.source, r.name, r.value, r.step_id) for r in c.rewards] == [("env", "a", 0.5, None)]


def test_later_rewards_and_marks_make_revisions_and_equal_ones_do_not() -> None:
    w = Worker().feed((STEPS, 1, step("k", 0)), (STEPS, 2, session("k", "completed")))
    w.feed((REWARDS, 3, reward("k", 0.1)))
    w.feed((REWARDS, 4, reward("k", 0.1)), (REWARDS, 4, reward("k", 0.9)))  # a retry; an equal revision that came later
    w.feed((REWARDS, 5, reward("k", 0.7, revision=1)))
    w.feed((REWARDS, 6, curation("k", "c1", trainable=False, tags=("bad",))))
    w.feed((REWARDS, 7, curation("k", "c2", trainable=True)), (REWARDS, 8, curation("k", "c1", trainable=False)))
    assert [(k[1], c.rewards[0].value if c.rewards else None, c.trainable) for k, c in w.candidates.items()] == [
        (0, None, True), (1, 0.1, True), (2, 0.7, True), (3, 0.7, False), (4, 0.7, True),
    ]  # fmt: skip
    assert w.last("k").tags == ("bad",)


def test_no_reward_is_not_zero_and_step_rewards_name_their_step() -> None:
    w = Worker().feed(
        (STEPS, 1, step("k", 0)), (REWARDS, 1, reward("k", None)), (REWARDS, 1, reward("k", 0.2, n=0)),
        (REWARDS, 1, curation("k", "c", n=0, trainable=False, quality=0.5)), (STEPS, 2, session("k", "failed", reason="gave up")),
    )  # fmt: skip
    c = w.last("k")
    assert [(r.step_id, r.value) for r in c.rewards] == [(None, None), ("k~C0.0", 0.2)]
    assert (c.outcome, c.trainable, c.reason) == ("failed", False, "no trainable step")
    assert (c.steps[0].reason, c.steps[0].quality) == ("curation", 0.5)
    assert w.trajectories["k"].reason == "gave up"


def test_tick_past_the_limit_closes_first_and_the_step_after_it_is_late() -> None:
    w = Worker().feed((STEPS, 0, step("k", 0)), (STEPS, 1000, Tick(partition=0)))
    assert not w.trajectories
    w.feed((STEPS, 1001, step("k", 1)), (STEPS, 1001, step("k", 1)))
    assert (w.trajectories["k"].outcome, w.trajectories["k"].closed_at) == ("timed_out", 1001)
    assert [(m.step_id, m.kind, m.offset) for m in w.marks] == [("k~C1.0", "late", 2)]
    assert len(w.trajectories["k"].steps) == 1


def test_time_on_rewards_closes_nothing() -> None:
    w = Worker().feed((STEPS, 0, step("k", 0)), (REWARDS, 99_999, Tick(partition=0)))
    assert not w.trajectories and w.state.event_time == 0


def test_reward_waits_for_its_target_then_is_buried() -> None:
    w = Worker().feed((REWARDS, 0, reward("k", 0.3)), (REWARDS, 0, reward("k", 0.4, n=1)), (REWARDS, 0, reward("x")))
    w.feed((STEPS, 10, step("k", 0)), (STEPS, 20, session("k", "completed")))
    assert [r.value for r in w.last("k").rewards] == [0.3]
    assert not w.burials
    w.feed((STEPS, 501, Tick(partition=0)))
    assert [(b.source, b.offset, b.reason) for b in w.burials] == [
        (REWARDS, 1, "unknown_target"),
        (REWARDS, 2, "unknown_target"),
    ]
    assert not w.state.waiting_for


def test_early_completion_leaves_time_for_spooled_steps() -> None:
    w = Worker().feed((STEPS, 0, session("k", "completed")), (STEPS, 0, session("x", "completed")))
    w.feed((STEPS, 100, step("k", 0)), (STEPS, 101, session("k", "completed")), (STEPS, 102, step("k", 1, [1, 2], [3])))
    assert not w.trajectories
    w.feed((STEPS, 501, Tick(partition=0)))
    assert [(t.outcome, len(t.steps)) for t in w.trajectories.values()] == [("completed", 2)]
    assert [(b.source, b.offset, b.reason) for b in w.burials] == [(STEPS, 1, "unknown_target")]


def test_what_cannot_be_folded_is_buried_and_changes_nothing() -> None:
    w = Worker().feed(
        (STEPS, 0, Bad("undecodable", "no header")),
        (STEPS, 0, reward("k")),
        (STEPS, 0, step("k", 0, prompt_token_ids=b"123")),
        (STEPS, 0, step("k", 0, step_id="other~C0.0")),
        (STEPS, 0, step("k", 0, run_id="NO")),
        (REWARDS, 0, reward("k", float("nan"))),
        (REWARDS, 0, curation("k", "c", quality=1.5)),
        (REWARDS, 0, step("k", 0)),
    )
    assert [(b.source, b.offset, b.reason) for b in w.burials] == [
        (STEPS, 0, "undecodable"), *((STEPS, i, "invalid") for i in range(1, 5)), *((REWARDS, i, "invalid") for i in range(3)),
    ]  # fmt: skip
    assert not w.state.opened and w.state.applied == [4, 2]
    fold = Fold(Assembly(), LIMITS)
    fold.record(STEPS, 0, 0, b"wrong key", step("k", 0))
    assert [b.reason for b in fold.state.pending.burials] == ["invalid"]


LARGE = bytes(9 << 20)


@pytest.mark.parametrize(
    ("source", "event"),
    [
        (STEPS, step("k", 0, step_id=f"k~{'C' * 201}.0")),
        (STEPS, step("k", 0, finish_reason="x" * 201)),
        (STEPS, step("k", 0, version_last="x" * 201)),
        (STEPS, step("k", 0, versions=(VersionSpan(version="x" * 201, start=0, end=1),))),
        (STEPS, step("k", 0, tags=(Tag(name="x" * 201, evidence=""),))),
        (STEPS, step("k", 0, tags=(Tag(name="x", evidence="y" * (9 << 18)),) * 2)),
        (STEPS, step("k", 0, response_json=LARGE)),
        (STEPS, step("k", 0, prompt_token_ids=LARGE)),
        (STEPS, session("k", "opened", metadata_json=LARGE + b" ")),
        (REWARDS, reward("k", name="x" * 201)),
        (REWARDS, curation("k", "c", tags=("x" * 201,))),
        (REWARDS, curation("k", "c", tags=("x",) * 51)),
    ],
    ids=lambda v: "",
)
def test_what_would_make_our_own_records_too_large_is_buried(source: Source, event: Any) -> None:
    w = Worker().feed((source, 0, event))
    assert [(b.source, b.reason) for b in w.burials] == [(source, "invalid")] and not w.state.opened


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"status": "aborted"}, "status aborted"),
        ({"response_logprobs": None, "tokens_absent_reason": "no logprobs"}, "no logprobs"),
        ({"response_logprobs": pack_logprobs([-1, -1])}, "2 log-probabilities for 1 tokens"),
        ({"version_last": "r/4.0"}, "version not certain"),
        ({"version_first": None, "version_last": None}, "version not certain"),
        ({"version_first": "default", "version_last": "default"}, "sampled by an engine without a version of ours"),
        ({"version_first": "q/3.0", "version_last": "q/3.0"}, "sampled by version q/3.0 of another run"),
        ({"response_token_ids": b"", "response_logprobs": b""}, "no sampled tokens"),
        ({"response_logprobs": pack_logprobs([float("nan")])}, "log-probabilities that are not finite"),
        ({"response_logprobs": pack_logprobs([float("-inf")])}, "log-probabilities that are not finite"),
    ],
)
def test_untrainable_steps_say_why(more: dict[str, Any], reason: str) -> None:
    w = Worker().feed((STEPS, 0, step("k", 0, **more)), (STEPS, 1, session("k", "completed")))
    assert w.trajectories["k"].steps[0].untrainable_reason == reason
    c = w.last("k")
    assert (c.trainable, c.oldest_sync_index, c.trainable_tokens) == (False, None, 0)


def test_horizon_and_bound_forget_the_oldest() -> None:
    limits = replace(LIMITS, closed_horizon=2000, closed_max=2)
    w = Worker(limits).feed(
        *[(STEPS, i, e) for i in range(3) for e in (step(f"k{i}", 0), session(f"k{i}", "completed"))]
    )
    assert [k[1] for k in w.state.closed] == ["k0", "k1", "k2"]  # never what is just being put out
    w.feed((STEPS, 10, Tick(partition=0)))
    assert [k[1] for k in w.state.closed] == ["k1", "k2"]
    w.feed((STEPS, 2003, Tick(partition=0)), (REWARDS, 2002, Tick(partition=0)))
    assert [k[1] for k in w.state.closed] == ["k2"]
    w.feed((REWARDS, 9000, reward("k2")), (STEPS, 9501, Tick(partition=0)))
    assert [b.reason for b in w.burials] == ["unknown_target"]


def test_too_many_waiting_bury_the_oldest() -> None:
    w = Worker(replace(LIMITS, waiting_max=2)).feed(*[(REWARDS, 0, reward(f"k{i}")) for i in range(3)])
    assert [b.offset for b in w.burials] == [0]


def test_lost_payload_still_gives_a_candidate() -> None:
    w = Worker()
    w.decide([(STEPS, 0, 0, step("k", 0)), (STEPS, 1, 1, session("k", "completed"))])
    w.state.apply([op.LOST, "r", "k", "payload lost to retention"])
    w.payload.clear()
    w.emit()
    assert (w.last("k").outcome, w.last("k").trainable, w.last("k").reason) == (
        "lost",
        False,
        "payload lost to retention",
    )
    assert w.trajectories["k"].segments == () and w.trajectories["k"].steps[0].trainable is False


def test_a_new_topic_closes_what_was_open_as_lost_and_starts_anew() -> None:
    w = Worker().feed((STEPS, 5, step("k", 0)), (STEPS, 6, step("j", 0)), (STEPS, 6, session("j", "completed")))
    w.fold.replaced(STEPS, "new", 0)
    w.batch([])
    assert (w.last("k").outcome, w.last("k").reason) == ("lost", "claw.steps was replaced by a new topic")
    assert w.state.applied == [-1, -1] and w.state.topic_ids == ["new", ""] and ("r", "j") not in w.state.closed


def test_state_log_drops_fenced_writers_and_repeated_deltas() -> None:
    state = Assembly()
    log = StateLog()

    def delta(epoch: int, seq: int, key: str) -> Any:
        return state_log.delta(epoch, seq, state, [[op.OPENED, "r", key, 0, "train"]])

    log.read(6, CODEC.decode(CODEC.encode(delta(5, 1, "a"))), 1)  # its marker was trimmed
    log.read(7, delta(5, 1, "again"), 1)
    log.read(8, AssemblyMarker(worker="w", steps_topic_id="s", rewards_topic_id="r", created_at=0), 1)
    log.read(9, delta(5, 2, "zombie"), 1)
    log.read(10, delta(8, 2, "b"), 1)
    assert [k[1] for k in log.state.opened] == ["a", "b"]
    with pytest.raises(UnreadableStateLog, match="delta 4 follows 2"):
        log.read(11, delta(8, 4, "d"), 1)
    with pytest.raises(UnreadableStateLog, match="delta 2 follows 0"):
        StateLog().read(2, delta(1, 2, "its beginning is gone"), 1)


def test_state_log_drops_what_a_worker_wrote_that_knew_another_topic_of_that_name() -> None:
    """Made anew under a worker whose epoch is of the old one: taken for the highest, it would have silenced every later owner."""
    log, state = StateLog(), Assembly()
    log.read(0, state_log.delta(700, 31, state, [[op.OPENED, "r", "old", 0, "train"]]), 1)
    log.read(1, AssemblyMarker(worker="w", steps_topic_id="s", rewards_topic_id="r", created_at=0), 1)
    log.read(2, state_log.delta(700, 32, state, [[op.OPENED, "r", "older", 0, "train"]]), 1)
    log.read(3, state_log.delta(1, 1, state, [[op.OPENED, "r", "new", 0, "train"]]), 1)
    assert [k[1] for k in log.state.opened] == ["new"] and log.seq == 1


KEYS = ("a", "b", "c")
MOMENT = st.integers(0, 400)


@st.composite
def inputs(draw: st.DrawFn) -> tuple[list[tuple[int, Any]], list[tuple[int, Any]]]:
    """A log of steps and one of rewards, with timestamps that rise."""
    steps: list[Any] = []
    chains: dict[str, list[int]] = {k: [1] for k in KEYS}
    numbers = dict.fromkeys(KEYS, 0)
    for _ in range(draw(st.integers(1, 14))):
        key = draw(st.sampled_from(KEYS))
        kind = draw(st.sampled_from(["step", "step", "step", "fork", "blind", "opened", "completed", "tick"]))
        if kind in ("step", "fork", "blind"):
            n = numbers[key]
            numbers[key] += 1
            prompt = chains[key] if kind != "fork" else [1, 7]
            more = {"prompt_token_ids": None} if kind == "blind" else {}
            steps.append(step(key, n, prompt, [n + 10], **more))
            chains[key] = [*prompt, n + 10, 2]
        elif kind == "tick":
            steps.append(Tick(partition=0))
        else:
            steps.append(session(key, kind, f"{key}-{kind}-{draw(st.integers(0, 1))}", metadata_json=b"{}"))
    rewards: list[Any] = []
    for i in range(draw(st.integers(0, 10))):
        key, n = draw(st.sampled_from(KEYS)), draw(st.none() | st.integers(0, 3))
        if draw(st.booleans()):
            rewards.append(reward(key, draw(st.sampled_from([0.0, 1.0, None])), n, "a", draw(st.integers(0, 2))))
        else:
            rewards.append(curation(key, f"e{i}", n, trainable=draw(st.booleans())))
    logs = []
    for log in (steps, rewards):
        at = 0
        timed = []
        for event in log:
            at += draw(MOMENT)
            timed.append((at, event))
        timed.append((at + 5000, Tick(partition=0)))
        logs.append(timed)
    return logs[0], logs[1]


def again(draw: st.DrawFn, log: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """The log with some records appearing once more, later."""
    out = list(log)
    for _ in range(draw(st.integers(0, 3))):
        source = draw(st.integers(0, len(out) - 1))
        at = draw(st.integers(source + 1, len(out)))
        out.insert(at, (out[at - 1][0], out[source][1]))
    return out


def merged(draw: st.DrawFn, logs: Sequence[list[tuple[int, Any]]]) -> list[tuple[Source, int, int, Any]]:
    """Any interleaving that keeps each log's own order."""
    left = [list(enumerate(log)) for log in logs]
    out: list[tuple[Source, int, int, Any]] = []
    while left[0] or left[1]:
        source: Source = STEPS if not left[1] or (left[0] and draw(st.booleans())) else REWARDS
        offset, (at, event) = left[source].pop(0)
        out.append((source, offset, at, event))
    return out


def content(w: Worker) -> tuple[dict[str, Trajectory], dict[str, Candidate]]:
    """What must not depend on interleaving, duplicates or crashes: trajectories without places, the last candidates without number."""
    trajectories = {
        k: replace(t, steps=tuple(replace(s, offset=0) for s in t.steps)) for k, t in w.trajectories.items()
    }
    return trajectories, {k: replace(w.last(k), revision=0) for k in trajectories}


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_interleaving_with_duplicates_and_crashes_gives_the_same(data: st.DataObject) -> None:
    logs = data.draw(inputs())
    plain = Worker()
    for source in (STEPS, REWARDS):
        plain.batch([(source, i, at, e) for i, (at, e) in enumerate(logs[source])])
    # What was buried for want of a target and is sent once more may find it then: that is what replaying a dead letter is for.
    records = merged(data.draw, logs if plain.burials else [again(data.draw, log) for log in logs])
    other, at = Worker(), 0
    while at < len(records):
        size = data.draw(st.integers(1, 5))
        other.decide(records[at : at + size])
        at += size
        moment = data.draw(st.sampled_from(["go on", "crash before outputs", "crash after outputs", "snapshot"]))
        if moment == "crash before outputs":
            other.crash()
            continue
        other.emit()
        if moment == "crash after outputs":
            other.crash()
        elif moment == "snapshot":
            other.snapshot()
    assert content(other) == content(plain)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_state_rebuilt_from_the_log_equals_the_state(data: st.DataObject) -> None:
    records = merged(data.draw, data.draw(inputs()))
    w, at = Worker(), 0
    while at < len(records):
        size = data.draw(st.integers(1, 4))
        w.batch(records[at : at + size])
        at += size
        if data.draw(st.integers(0, 3)) == 0:
            w.snapshot()
    w.decide([])
    log = StateLog()
    for offset, value in enumerate(w.log, 1):
        log.read(offset, CODEC.decode(value), len(value))
    assert log.seq == w.seq
    ticks_alone = {"applied": None, "time": None}  # need not be on the log
    assert _fields(log.state) | ticks_alone == _fields(w.state) | ticks_alone
    assert Assembly.load(log.state.dump()) == log.state


def _fields(state: Assembly) -> dict[str, Any]:
    return {name: getattr(state, name) for name in Assembly.__slots__}


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_reading_again_changes_nothing(data: st.DataObject) -> None:
    records = merged(data.draw, data.draw(inputs()))
    w = Worker().batch(records)
    before, seq = content(w), w.seq
    w.decide([])
    w.batch(records)
    assert content(w) == before and w.seq <= seq + 1
