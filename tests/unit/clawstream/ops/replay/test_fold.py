"""Test the replay fold, replay from the lake, and copies: lists in, lists out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.assemble import (
    ANONYMOUS_KEY,
    LIMITS,
    InMemoryPartition,
    assessment,
    content,
    curation,
    reward,
    session,
    step,
)
from support.examples import examples

from clawstream.cli.common_options import instant
from clawstream.ops.replay.fold import OutputRecord, Replay, ReplayEvent
from clawstream.ops.replay.lake_source import (
    READ,
    LakeReplaySource,
    Span,
    partitions_of,
    snapshot_versions,
)
from clawstream.ops.replay.record_filter import RecordFilter, renamed
from clawstream.ops.replay.run import (
    ReplayRequest,
    home_of,
    identity,
    keep_settings,
    replay_settings,
)
from clawstream.ops.replay.verify import first_difference
from clawstream.runtime.kafka.window import LEAST_KB, MOST_KB, READ_AHEAD_KB, Window, read_ahead
from clawstream.runtime.process.config import load
from clawstream.runtime.process.remembered_settings import load_remembered, missing_secrets
from clawstream.runtime.times import millis, parse_instant
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.records import Candidate, Reward, Step, Tick, Trajectory, VersionSpan
from clawstream.schemas.settings import KafkaSettings, Settings
from clawstream.stream_jobs.assemble.payload.cache import CachedPayload, payload_of
from clawstream.stream_jobs.assemble.payload.trainability import trainability
from clawstream.stream_jobs.assemble.state.trajectories import REWARDS, STEPS
from clawstream.stream_jobs.lake.tables.catalog import catalog
from clawstream.stream_jobs.lake.tables.row_events import events_of
from clawstream.stream_jobs.lake.tables.table import ConsumedRecord
from clawstream.stream_jobs.lake.writer import Lake

Log = list[tuple[int, Any]]
CODEC = Codec()


@st.composite
def logs(draw: st.DrawFn) -> tuple[Log, Log]:
    """Draw (time, event) lists of steps and of rewards; a tick ends both. Some records repeat."""
    steps: list[Any] = []
    for n in range(draw(st.integers(1, 12))):
        key = draw(st.sampled_from(("a", "b", ANONYMOUS_KEY)))
        match draw(st.sampled_from(("step", "step", "done", "opened", "tick"))):
            case "step":
                steps.append(step(key, n, [1, *range(n)], [n + 10]))
            case "done":
                steps.append(
                    session(
                        key,
                        "completed",
                        step_id=f"{key}~C{max(0, n - 1)}.0" if key == ANONYMOUS_KEY else None,
                    )
                )
            case "opened" if key != ANONYMOUS_KEY:
                steps.append(session(key, "opened", metadata_json=b"{}"))
            case _:
                steps.append(Tick(partition=0))
        if draw(st.booleans()):
            steps.append(draw(st.sampled_from(steps)))
    rewards: list[Any] = []
    for n in range(draw(st.integers(0, 8))):
        key = draw(st.sampled_from(("a", "b")))
        made = reward(
            key,
            draw(st.sampled_from([0.0, 1.0])),
            draw(st.none() | st.integers(0, 5)),
            revision=n % 3,
        )
        rewards.append(
            draw(
                st.sampled_from(
                    [made, curation(key, f"e{n}", trainable=False), assessment(key, 0.5)]
                )
            )
        )
    timed = []
    for log in (steps, rewards):
        times = sorted(draw(st.lists(st.integers(0, 3000), min_size=len(log), max_size=len(log))))
        timed.append([*zip(times, log, strict=True), (9000, Tick(partition=0))])
    return timed[0], timed[1]


def moments(steps: Log, rewards: Log) -> list[ReplayEvent]:
    """Return the events in topic order, without ticks on rewards, which have no effect."""
    both = [(t, STEPS, i, e) for i, (t, e) in enumerate(steps)]
    both += [(t, REWARDS, i, e) for i, (t, e) in enumerate(rewards) if not isinstance(e, Tick)]
    return [
        ReplayEvent(t, 0, s, i, getattr(e, "trajectory_key", "").encode(), e)
        for t, s, i, e in sorted(both, key=lambda m: m[:3])
    ]


def no_rules(_: Trajectory) -> list[Reward]:
    return []


def payload_again(steps: Log) -> Any:
    """Return a function that reads from the list the payload that the cache dropped."""

    def again(_: int, starts: Mapping[int, int]) -> Iterable[tuple[int, CachedPayload]]:
        for offset, start in starts.items():
            event = steps[offset][1]
            kept: CachedPayload = (
                payload_of(event, trainability(event), start)
                if isinstance(event, Step)
                else event.metadata_json or b""
            )
            yield offset, kept

    return again


def play(
    steps: Log, rewards: Log, rules: Any = no_rules, cache_bytes: int = 1 << 20
) -> tuple[Replay, list[OutputRecord]]:
    replay = Replay("r", 1, LIMITS, CODEC, rules, "id", cache_bytes, payload_again(steps))
    return replay, [out for m in moments(steps, rewards) for out in replay.take(m)]


def last(outs: Iterable[OutputRecord]) -> dict[str, Candidate]:
    found: dict[str, Candidate] = {}
    for out in outs:
        if isinstance(out.event, Candidate):
            found[out.event.trajectory_id] = replace(out.event, revision=0)
    return found


@settings(max_examples=examples(40))
@given(logs())
def test_the_last_revisions_are_those_of_assemble_and_a_replay_is_repeatable(
    given_logs: tuple[Log, Log],
) -> None:
    steps, rewards = given_logs
    worker = InMemoryPartition()
    worker.feed(*((STEPS, t, e) for t, e in steps))
    worker.feed(*((REWARDS, t, e) for t, e in rewards))
    trajectories, candidates = content(worker)

    replay, outs = play(steps, rewards)
    assert last(outs) == candidates
    whole = {o.event.trajectory_id: o.event for o in outs if isinstance(o.event, Trajectory)}
    without = {
        k: replace(t, steps=tuple(replace(s, offset=0) for s in t.steps)) for k, t in whole.items()
    }
    assert without == trajectories
    assert sum(replay.stats.trajectories.values()) == len(trajectories)
    assert play(steps, rewards)[1] == outs
    assert play(steps, rewards, cache_bytes=0)[1] == outs  # all payload is read again
    times = [o.time for o in outs]
    assert times == sorted(times)


def test_rules_answer_when_a_trajectory_closes() -> None:
    def rules(trajectory: Trajectory) -> list[Reward]:
        return [reward(trajectory.trajectory_id, float(len(trajectory.steps)), name="count")]

    steps: Log = [
        (10, step("a", 0)),
        (20, step("a", 1)),
        (30, session("a", "completed")),
        (40, Tick(partition=0)),
    ]
    replay, outs = play(
        steps, [(25, reward("a", 0.5)), (35, reward("a", 0.25, name="late"))], rules
    )
    assert [(o.topic, type(o.event).__name__, o.time) for o in outs] == [
        ("rewards", "Reward", 25),
        ("candidates", "Tick", 30),
        ("trajectories", "Trajectory", 30),
        ("rewards", "Reward", 30),
        ("candidates", "Candidate", 30),
        ("candidates", "Tick", 35),
        ("rewards", "Reward", 35),
        ("candidates", "Candidate", 35),
    ]
    first, second = (o.event for o in outs if isinstance(o.event, Candidate))
    assert {r.name: r.value for r in first.rewards} == {"a": 0.5, "count": 2.0}
    assert {r.name: r.value for r in second.rewards} == {"a": 0.5, "count": 2.0, "late": 0.25}
    assert (first.revision, second.revision, replay.stats.answers) == (0, 1, 1)
    (place,) = {
        tuple(sorted((o.headers or {}).items())) for o in outs if isinstance(o.event, Candidate)
    }
    assert dict(place) == {
        "topic_id": b"id",
        "partition": b"0",
        "first_offset": b"0",
        "last_offset": b"0",
    }


def test_what_is_open_at_the_end_is_counted_and_bad_targets_too() -> None:
    replay, outs = play([(10, step("a", 0)), (20, step("b", 0))], [(30, reward("nobody"))])
    assert not [o for o in outs if o.topic != "rewards"]
    assert (replay.open, replay.waiting, replay.stats.steps) == (2, 1, 2)
    assert replay.stats.as_dict()["dead_letters"] == {}
    replay, _ = play([(10, step("a", 0)), (5000, Tick(partition=0))], [(30, reward("nobody"))])
    assert (replay.open, replay.waiting) == (0, 0)
    assert replay.stats.as_dict()["dead_letters"] == {"unknown_target": 1}
    assert replay.stats.as_dict()["trajectories"] == {"timed_out": 1}


# -- lake

SPANS = (VersionSpan(version="r/1.0", start=0, end=1), VersionSpan(version="r/2.0", start=1, end=2))


@pytest.mark.parametrize(
    "event",
    [
        step(
            "a", 1, [1, 2, 3], [4, 5], versions=SPANS, request_json='{"ä":1}'.encode(),
            received_at=1_700_000_000_123_456,
        ),
        step(
            "a", 2, prompt_token_ids=None, response_token_ids=None, response_logprobs=None,
            tokens_absent_reason="x",
        ),
        step("a", 3, [], []),
        session("a", "opened", metadata_json=b'{"gold":"x"}', group_id="g", group_size=4, round=2),
        session("a", "failed", reason="why"),
        reward("a", None, 2),
        replace(reward("a", 0.1), reason="because", detail_json=b"[]", created_at=12),
        curation("a", "e", quality=0.5, tags=("x", "y")),
        curation("a", "e", trainable=False),
        assessment("a", 0.5, 0.25, 1.0),
    ],
)  # fmt: skip
def test_a_row_is_the_record_again(event: Any) -> None:
    (name,) = (
        n for tables in READ.values() for n, record in tables.items() if record is type(event)
    )
    table = catalog()[name]
    filler: Any = {
        Step: step("z", 9, [7] * 3, [8]), Reward: reward("z"),
    }.get(type(event), event)  # fmt: skip
    rows = [
        row
        for e in (filler, event, filler)
        for row in table.rows_of(ConsumedRecord("T", 0, 0, 0, {}, e))
    ]
    arrow = table.arrow(rows)
    assert list(events_of(type(event), arrow)) == [filler, event, filler]
    chunks = pa.concat_tables([arrow.slice(0, 1), arrow.slice(1)])
    assert list(events_of(type(event), chunks.slice(1, 1))) == [event]
    older = arrow.drop_columns(
        [c for c in ("subject_id", "key_id", "detail_json") if c in arrow.column_names]
    )
    assert next(events_of(type(event), older)).trajectory_key == filler.trajectory_key


@pytest.mark.slow
def test_a_lake_with_more_partitions_than_the_settings(tmp_path: Path) -> None:
    few = Settings(data_dir=tmp_path, run_id="r", kafka=KafkaSettings(partitions=2))
    lake = Lake(few.lake_uri, {}, 100)
    lake.acquire()
    said: list[Any] = [step("a", 0), session("a", "completed")]
    for offset, event in enumerate(said):
        table = next(n for n, record in READ[STEPS].items() if record is type(event))
        lake.append(
            table,
            catalog()[table].rows_of(ConsumedRecord("T", 20, offset, 1000, {}, event)),
            {("T", 20): offset + 1},
            print,
        )
    versions = snapshot_versions(few)
    assert partitions_of(few, versions) == 21
    assert partitions_of(few.model_copy(update={"run_id": "nobody"}), versions) == 2
    source = LakeReplaySource(few, versions, 21, Span(), RecordFilter("r"))
    # Without a cache: all payload is read again.
    replay = Replay("r", 21, LIMITS, CODEC, no_rules, "id", 0, source.payload)
    outs = [out for event in source.events() for out in replay.take(event)]
    assert {o.partition for o in outs if o.topic == "trajectories"} == {20}
    assert list(last(outs)) == ["a"]


@pytest.mark.slow
def test_a_pin_that_names_only_steps(tmp_path: Path) -> None:
    """Tables that the pin does not name are empty.

    The replay gets no rewards, no closings, and the payload of steps alone.
    """
    mine = Settings(data_dir=tmp_path, run_id="r", kafka=KafkaSettings(partitions=1))
    lake = Lake(mine.lake_uri, {}, 100)
    lake.acquire()
    for offset, event in enumerate((step("a", 0), session("a", "completed"))):
        table = next(n for n, kind in READ[STEPS].items() if kind is type(event))
        placed = ConsumedRecord("T", 0, offset, 1000, {}, event)
        lake.append(table, catalog()[table].rows_of(placed), {("T", 0): offset + 1}, print)
    only_steps = {**dict.fromkeys(catalog()), "steps": snapshot_versions(mine)["steps"]}
    versions = snapshot_versions(mine, only_steps)
    assert list(versions) == ["steps"] and partitions_of(mine, versions) == 1
    source = LakeReplaySource(mine, versions, 1, Span(), RecordFilter("r"))
    assert [type(event.record) for event in source.events()] == [Step, Tick]


def test_a_record_filter_selects_a_run_and_renames_it() -> None:
    rule = replace(reward("a"), source="rule", by="clawstream.reward")
    renaming = RecordFilter("r", "n", rewards=False)
    kept = renaming.apply(step("a", 0, [1], [4, 5], versions=SPANS))
    assert (kept.run_id, kept.version_first, [s.version for s in kept.versions]) == (
        "n",
        "n/3.0",
        ["n/1.0", "n/2.0"],
    )
    assert trainability(kept).reason is None
    others = [replace(step("a", 1), run_id="other"), rule, replace(rule, source="judge")]
    assert [renaming.apply(event) for event in others] == [None, None, None]
    assert RecordFilter("r").apply(rule) is rule
    assert renamed(step("a", 0, version_first="default"), "n").version_first == "default"


def test_prefixes_names_and_windows(tmp_path: Path) -> None:
    live = Settings(data_dir=tmp_path)
    with pytest.raises(SettingsError, match="1 to 25"):
        replay_settings(live, "No", "run", 3)
    target = replay_settings(live, "x", "run", 3)
    assert target.lake_uri == str(home_of(live, "x") / "lake") and target.blob_uri == live.blob_uri
    assert target.bootstrap_servers == live.bootstrap_servers and not target.jobs.write_ticks
    assert Settings.model_validate_json(target.model_dump_json(exclude_defaults=True)) == target
    window = Window("t", "id", {0: (3, 5), 1: (0, 0)})
    assert (
        Window.from_dict(json.loads(json.dumps(window.as_dict()))) == window and window.offsets == 2
    )


@pytest.mark.slow
@given(st.integers(0, 5000))
def test_what_is_read_ahead_does_not_grow_with_the_partitions(partitions: int) -> None:
    options = read_ahead(partitions)
    each = options["queued_max_messages_kbytes"] + options["fetch_message_max_bytes"] // 1024
    assert LEAST_KB <= each <= MOST_KB
    assert partitions * each <= READ_AHEAD_KB or each == LEAST_KB


def test_times_and_differences() -> None:
    assert instant("1700000000000", "--since") == 1_700_000_000_000
    assert (
        instant("2023-11-14T22:13:20", "--since")
        == instant("2023-11-14T23:13:20+01:00", "--since")
        == 1_700_000_000_000
    )
    assert instant(None, "--since") is None
    with pytest.raises(SystemExit):
        instant("yesterday", "--since")
    now = datetime(2026, 11, 22, 8, tzinfo=UTC)
    assert (
        parse_instant("2h", now)
        == parse_instant("2026-11-22T06:00", now)
        == datetime(2026, 11, 22, 6, tzinfo=UTC)
    )
    assert parse_instant("7d", now).day == 15 and millis(parse_instant("1", now)) == 1
    for wrong in (
        "-1",
        "9" * 20,
        "9" * 5000,
        "99999999999999d",
        "9999-12-31T23:59-23:00",
        "1969-12-31",
        "0001-01-01T00:00+14:00",
        "99999d",
        "x" * 300,
    ):
        with pytest.raises(ValueError, match="write a time like") as raised:
            parse_instant(wrong, now)
        assert len(str(raised.value)) < 250
    one, two = {"content_hash": "1"}, {"content_hash": "2"}
    assert first_difference([one], [one, two]) is None
    assert first_difference([one, two], [one]) == {"index": 1, "recorded": two, "replayed": None}
    assert first_difference([one, two], [one, one]) == {
        "index": 1,
        "recorded": two,
        "replayed": one,
    }


@pytest.mark.parametrize("changed", [{"train_truncated": True}, {"tick_interval_s": 7.0}])
def test_another_outcome_is_not_taken_for_the_one_that_was_done(changed: dict[str, Any]) -> None:
    settings = Settings()
    other = settings.model_copy(update={"jobs": settings.jobs.model_copy(update=changed)})
    assert identity(settings, ReplayRequest("x")) != identity(other, ReplayRequest("x"))


def test_the_settings_of_a_replay_have_no_secrets_and_say_which_are_missing(tmp_path: Path) -> None:
    of_run = load(
        None,
        [
            f"data_dir={tmp_path}",
            "kafka.bootstrap_servers='a:1'",
            "kafka.security={protocol: sasl_ssl, user: u, password: hunter2}",
            "rollout.extra_args=['--api-key', hunter2]",
        ],
        {},
    )
    target = replay_settings(of_run, "again", "r", 4)
    target.data_dir.mkdir(parents=True)
    keep_settings(target)
    file = home_of(of_run, "again") / "settings.yaml"
    assert all("hunter2" not in path.read_text() for path in file.parent.iterdir())
    recorded = load_remembered(file, [], {})
    assert (recorded.run_id, recorded.data_dir, recorded.kafka.topics.prefix) == (
        "r",
        file.parent,
        "replay-again",
    )
    assert recorded.kafka.security.user == "u"
    assert missing_secrets(recorded) == [
        "kafka.security.password",
        "rollout.extra_args",
    ]
