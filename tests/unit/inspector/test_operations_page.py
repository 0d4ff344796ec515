"""Test the operations page, and the counts of the lake over time, over small lakes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.export_lake import turn
from support.inspector import HOSTILE, NOW_S, OBSERVED, OK, WORKER, Inspected, inspected
from support.run_lake import run_lake
from support.small_lake import SmallLake

from clawstream.inspector.operations.observation import Consumer, Observation, Spool, Weights
from clawstream.inspector.operations.time_range import time_range
from clawstream.inspector.queries.activity import (
    Activity,
    activity,
    newest_version,
    open_dead_letters,
)
from clawstream.inspector.queries.lake import COPIES
from clawstream.inspector.web.operations import LIVE_PARTS, TEMPLATE, _state
from clawstream.inspector.web.rendering import block_of
from clawstream.query.live_lake import LiveLake
from clawstream.schemas.records import DeadLetter, DeadLetterResolved
from clawstream.schemas.settings import Settings

pytestmark = pytest.mark.slow


def letter(offset: int, process: str) -> DeadLetter:
    return DeadLetter(
        topic="claw.steps", topic_id="t", partition=0, offset=offset, timestamp_ms=0,
        process=process, reason="invalid", detail="", created_at=0,
    )  # fmt: skip


def resolved(offset: int) -> DeadLetterResolved:
    return DeadLetterResolved(
        topic="claw.steps", topic_id="t", partition=0, offset=offset, action="dismissed", by="me",
        created_at=0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> LiveLake:
    """Records have log times in the second second, or at the end of the second minute."""
    settings = Settings(data_dir=tmp_path_factory.mktemp("activity"))
    run_lake(settings)
    later = SmallLake(settings)
    later.began_ms = 119_900
    step = turn("late", 0, [1], [2])
    later.put("steps", "S2", step, replace(step, step_id=step.step_id[:-1] + "11"))
    later.put("dead_letters", "DD", letter(1, "lake"), letter(1, "assemble"), letter(2, "lake"))
    later.put("dead_letters_resolved", "DD", resolved(2))
    return LiveLake(settings, COPIES)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Inspected:
    return inspected(Settings(data_dir=tmp_path_factory.mktemp("operations")))


class TestActivity:
    def test_is_counted_by_log_time(self, lake: LiveLake) -> None:
        found = {chart: series for chart, (_, series) in activity(lake, 0, 120, 60).items()}
        calls = found["calls"]
        assert calls["calls"][1] == 1 and calls["steps"][1] == 2
        assert calls["calls"][0] == calls["steps"][0] == 12
        assert calls["failed calls"] == [1, 0]
        assert found["trajectories"] == {"completed": [7, 0]}
        assert found["groups"] == {"admitted": [2, 0], "refused: zero_variance": [1, 0]}
        assert found["versions"] == {"versions": [3, 0]}
        assert found["dead_letters"] == {"invalid": [0, 2]}

    def test_buckets_begin_at_multiples_and_are_whole(self, lake: LiveLake) -> None:
        x, series = activity(lake, 65, 130, 60)["calls"]
        assert x == [60, 120] and series["steps"] == [2, 0]
        assert activity(lake, 600, 660, 60)["calls"] == ([600], {})

    def test_pages_that_look_at_once_share_an_answer(self, lake: LiveLake) -> None:
        shared = Activity(lake)
        assert shared(0, 120, 60) is shared(0, 120, 60) is not shared(0, 180, 60)

    def test_the_lake_knows_versions_letters_and_its_newest_commit(self, lake: LiveLake) -> None:
        newest = newest_version(lake)
        assert newest is not None and newest.version_id == "run/2.0"
        assert open_dead_letters(lake) == 1
        committed_s = lake.newest_commit_s()
        assert committed_s is not None and committed_s > 1_700_000_000

    def test_of_no_lake_is_empty(self, tmp_path: Path) -> None:
        settings = Settings(data_dir=tmp_path)
        lake = LiveLake(settings, COPIES)
        assert activity(lake, 0, 60, 60)["calls"] == ([0], {})
        assert (newest_version(lake), open_dead_letters(lake)) == (None, 0)
        assert lake.newest_commit_s() is None


class TestPage:
    def test_names_stalled_consumers_first_and_the_remedy(self, shown: Inspected) -> None:
        shown.parts.operations.take(OBSERVED)
        text = shown.client.get("/operations").text
        assert "2 problems" in text and text.index("kill -CONT 7") < text.index("<table")
        assert re.findall(r'class="dot \w+"></span>(\w+)', text)[:2] == ["stalled", "ok"]
        assert "claw-admit.old.train" in text.partition("<details>")[2]
        for words in ("run/3.0", " d ago", ">4<", "1 GiB", "2 KiB", "boom"):
            assert words in text, words

    def test_what_is_to_look_at_is_neither_a_problem_nor_none(self, shown: Inspected) -> None:
        absent = Consumer("claw-trainer", "claw.ready", 16, True, 1141.0, "absent", False)
        spool = Spool(0, 7, 0)
        quiet = Observation(NOW_S, None, [], [OK], [], [WORKER], None, 0, None, Spool(0, 0, 0))
        for found, said in (
            (quiet, ["no problem"]),
            (replace(quiet, consumers=[absent]), ["1 to look at", "absent: claw-trainer has 16"]),
            (replace(quiet, dead_letters=1), ["1 to look at", "1 open dead letter<"]),
            (
                replace(quiet, workers=[WORKER._replace(state="failed", error="boom")]),
                ["w is failed: boom"],
            ),
            (replace(quiet, spool=spool, dead_letters=2), ["2 to look at", "7 bytes aside"]),
        ):
            shown.parts.operations.take(found)
            text = shown.client.get("/operations").text
            assert all(words in text for words in said), said
            assert ("no problem" in text) == (found is quiet)

    def test_dead_letters_are_listed_with_their_reason_and_remedy(self, tmp_path: Path) -> None:
        made = inspected(Settings(data_dir=tmp_path))
        lost = replace(letter(1, "lake"), reason="unknown_target", detail=HOSTILE)
        made.written.lake.put("dead_letters", "DD", lost, replace(lost, process="assemble"),
                              letter(2, "lake"))  # fmt: skip
        made.written.lake.put("dead_letters_resolved", "DD", resolved(2))
        assert made.lake.refresh()
        text = made.client.get("/operations").text.partition('id="letters"')[2]
        assert "assemble, lake" in text and "unknown target" in text and "<img" not in text
        assert "clawstream dlq show claw.steps-0-1<" in text and "claw.steps-0-2" not in text

    def test_without_a_broker_shows_what_the_lake_has(self, shown: Inspected) -> None:
        lost = Observation(NOW_S, kafka_error="no Kafka answers at h:1")
        shown.parts.operations.take(lost)
        text = shown.client.get("/operations?until=1970-01-01T00:01:00").text
        assert "No broker answers: no Kafka answers at h:1" in text and "no broker<" in text
        assert 'until=1970-01-01T00%3A01%3A00" data' not in text
        assert "data-live" not in text

    @pytest.mark.parametrize("found", [Observation(NOW_S), Observation(NOW_S, "lost"), OBSERVED])
    def test_no_event_is_empty(self, shown: Inspected, found: Observation) -> None:
        """Browsers drop an event without data: the page would keep what it showed before."""
        shown.parts.operations.take(found)
        state = _state(shown.parts, time_range("1h", "", NOW_S))
        assert all(block_of(TEMPLATE, name, **state).strip() for name in LIVE_PARTS)

    def test_the_series_are_those_of_the_range(self, shown: Inspected) -> None:
        shown.parts.operations.take(OBSERVED)
        past = {"range": "15m", "until": "1970-01-01T00:15:00"}
        found = shown.client.get("/operations/series.json", params=past).json()
        assert (found["from"], found["to"]) == (0, 900)
        assert sum(found["charts"]["calls"]["series"]["steps"]) > 5
        assert found["charts"]["lag_seconds"]["series"] == {}
        then = {"range": "15m", "until": "2023-11-14T22:13:30"}
        found = shown.client.get("/operations/series.json", params=then).json()
        assert found["charts"]["lag_seconds"]["series"]["claw-lake"][-1] == 21.0
        assert found["charts"]["versions_behind"]["series"] == {"w": [None] * 89 + [2.0]}

    def test_escapes_what_processes_say(self, shown: Inspected) -> None:
        evil = OBSERVED.consumers[0]._replace(group=HOSTILE, topic=HOSTILE)
        process = OBSERVED.processes[0]._replace(
            name=HOSTILE, state=HOSTILE, status=HOSTILE, error=HOSTILE
        )
        worker = WORKER._replace(worker_id=HOSTILE, version=HOSTILE, error=HOSTILE)
        shown.parts.operations.take(
            replace(
                OBSERVED, problems=[(HOSTILE, HOSTILE)],
                consumers=[evil, evil._replace(status=None)], processes=[process],
                workers=[worker], weights=Weights(HOSTILE, 0.0), kafka_error=HOSTILE,
            )
        )  # fmt: skip
        text = shown.client.get("/operations").text
        assert "<img" not in text and "<script>alert" not in text and "&lt;img" in text
