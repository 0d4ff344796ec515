"""Every query of docs/cookbook.md gives the answer that the seeded run has by hand.

The views that the queries need follow the rules of the jobs.
"""

from __future__ import annotations

import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
from support.run_lake import CODEX, FLOW, mark, run_lake
from support.small_lake import SmallLake

from clawstream.query.connection import connect
from clawstream.schemas.records import Curation
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.assemble.state.annotations import CurationMark, CurationState

PAGE = Path(__file__).parents[4] / "docs" / "cookbook.md"
QUERIES = dict(re.findall(r"^## ([^\n]+)\n.*?```sql\n(.*?)```", PAGE.read_text(), re.S | re.M))
ANSWERS: dict[str, list[tuple[Any, ...]]] = {
    "Reward by task and version": [
        ("add", "run/0.0", 3, 2 / 3),
        ("add", "run/1.0", 1, 1.0),
        ("sub", "run/0.0", 2, 0.0),
        ("sub", "run/1.0", 1, None),
    ],
    "pass@k and pass^k": [
        ("add", 4, 2, 1, 0.5, 0.5),
        ("add", 4, 2, 2, 5 / 6, 1 / 6),  # 2 of the 6 pairs
        ("add", 4, 2, 4, 1.0, 0.0),
        ("sub", 2, 0, 1, 0.0, 0.0),
        ("sub", 2, 0, 2, 0.0, 0.0),
    ],
    "Distribution of staleness": [(0, 3, 0.75), (1, 1, 0.25)],
    "Mismatch of engine and trainer": [("run/1.0", 0.01, 0.125), ("run/2.0", 0.25, 0.5)],
    # Step add-1-0 was sampled by an older version, add-1-1 was passed after an update.
    "Tokens on which engine and trainer differ most": [
        ("run/1.0", step, token, t, -t / 8, -t / 8 - 2**-t, 2**-t, math.exp(-(2**-t)))
        for step, token, t in (
            ("add-0-0~0.0", 0, 3),
            ("add-0-0~0.0", 1, 4),
            ("add-0-0~1.0", 0, 6),
            ("add-0-1~1.0", 0, 8),
            ("add-0-1~1.0", 1, 9),
            ("add-0-1~2.0", 0, 9),
        )
    ],
    "The funnel: where calls are lost": [
        ("called", "engine 503 overloaded", 1),
        ("recorded", "late", 1),
        ("recorded", None, 1),
        ("assembled", None, 1),
        ("rewarded", "zero_variance", 2),
        ("admitted", "left out by curation, or by policy 1", 1),
        ("trained", None, 6),
    ],
    "Token cost of a reward": [
        ("add", 3.0, 8, 14, 12, 20 / 3),
        ("sub", 0.0, 3, 3, 6, None),
    ],
    "Longest tool loops": [("add-0-1", "search", '{"q": "x"}', 3)],
    "Drift: prompts that break the prefix": [
        (FLOW, "clean", 1, 1.0),
        (CODEX, "clean", 1, 0.5),
        (CODEX, "forked", 1, 0.5),
    ],
    "Late and revised rewards": [("add-0-1", 0, 0, 0.0, 1, 0.5)],
    "Share of curated data": [
        ("(nobody)", 5, 5 / 7, 3),
        ("alice", 1, 1 / 7, 0),
        ("bob", 1, 1 / 7, 1),
    ],
    "Best and worst of each group": [
        ("add-0", "add-0-0", 1.0, "add-0-1", 0.5),
        ("add-1", "add-1-1", 1.0, "add-1-0", 0.5),
    ],
    # From 0.15, 0.22, 0.14, 0.24 s to 1.001 s, and from 0.12, 0.32 s to 1.002 s.
    "Time from call to trained": [(0.816, 0.87675, 6)],
    "Latency and errors by agent": [
        (FLOW, 9, 0.12, 0.38, 38.0, 15 / 1.69, 0.0),
        (CODEX, 4, 0.14, 0.23, 40.0, 4 / 0.5, 0.25),
    ],
    "Groups without a signal": [("add", 2, 0.0), ("sub", 1, 1.0)],
    "Length and truncation by version": [("run/0.0", 10, 1.5, 0.1), ("run/1.0", 2, 2.0, 0.0)],
    "What each reward function says": [
        ("env", "score", "1", 6, 0.5, 0.0, None),
        ("judge", "helpful", "1", 2, 0.25, 0.5, "no text"),
    ],
}


@pytest.fixture(scope="module")
def sql(tmp_path_factory: pytest.TempPathFactory) -> Any:
    settings = Settings(data_dir=tmp_path_factory.mktemp("run"))
    run_lake(settings)
    return connect(settings)


def test_the_page_has_a_query_for_each_answer() -> None:
    assert list(QUERIES) == list(ANSWERS)
    assert PAGE.read_text().count("```sql") == len(ANSWERS) >= 15


@pytest.mark.slow
@pytest.mark.parametrize("question", ANSWERS)
def test_a_query_gives_the_right_answer(sql: Any, question: str) -> None:
    found = sql.execute(QUERIES[question]).fetchall()
    assert len(found) == len(ANSWERS[question])
    for row, expected in zip(found, ANSWERS[question], strict=True):
        assert [pytest.approx(v) if isinstance(v, float) else v for v in expected] == list(row)


@pytest.mark.slow
def test_of_each_field_the_last_mark_holds(sql: Any) -> None:
    columns = "trajectory_id, step_id, quality, trainable, tags, note, last_by, marks"
    assert sql.execute(f"select {columns} from curated order by 1").fetchall() == [
        ("add-0-1", None, 0.25, False, [], "loops", "bob", 3),
        ("sub-1-0", "sub-1-0~0.0", 1.0, None, None, None, "alice", 1),
    ]


@pytest.mark.slow
def test_the_funnel_counts_each_call_choice_once(sql: Any) -> None:
    steps, failed = sql.execute(
        "select (select count(*) from steps), (select count(*) from failed_calls)"
    ).fetchone()
    counted = sql.execute("select count(*), count(distinct step_id) from funnel").fetchone()
    assert counted == (steps + failed, steps)
    assert sql.execute("select distinct run_id from funnel").fetchall() == [("run",)]


@pytest.mark.slow
def test_the_curation_that_holds_is_that_of_assemble(tmp_path: Path) -> None:
    rng, settings = random.Random(5), Settings(data_dir=tmp_path)
    expected: dict[tuple[str, str | None], CurationState] = {}
    marks: list[Curation] = []
    for offset in range(300):
        key = f"t{rng.randrange(6)}"
        step = rng.choice([None, f"{key}~1.0"])
        quality = rng.choice([None, 0.0, 0.5, 1.0])
        trainable = rng.choice([None, False, True])
        tags = rng.choice([None, (), ("a",), ("a", "b")])
        earlier = [m for m in marks if (m.trajectory_key, m.step_id) == (key, step)]
        if earlier and rng.random() < 0.3:
            gone = rng.choice(earlier)
            marks.append(mark(offset, key, "me", step_id=step, takes_back=gone.event_id))
            expected[key, step].apply(
                CurationMark(
                    offset, step or "", None, None, None, offset, int(gone.event_id.lstrip("m"))
                )
            )
            continue
        marks.append(
            mark(offset, key, "me", step_id=step, quality=quality, trainable=trainable, tags=tags)
        )
        expected.setdefault((key, step), CurationState()).apply(
            CurationMark(
                offset, step or "", quality, trainable, None if tags is None else list(tags), offset
            )
        )
    SmallLake(settings).put("curation", "UU", *marks)
    found = (
        connect(settings)
        .execute("select trajectory_id, step_id, quality, trainable, tags from curated")
        .fetchall()
    )
    assert {(row[0], row[1]): row[2:] for row in found} == {
        target: (state.quality, state.trainable, state.tags)
        for target, state in expected.items()
        if state.marks
    }
