"""The query page: it runs queries in the sandbox only, shows their rows, and draws a chart."""

from __future__ import annotations

import asyncio
import json
import math
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime
from decimal import Decimal
from html import unescape
from threading import Event
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inspector import KEY, Inspected, inspected
from support.patience import until

from clawstream.inspection.sandboxed_sql import AT_ONCE, SandboxedSql
from clawstream.inspector.queries.sql import CELL_CHARS, Cancellation, Result, cell, chart_of
from clawstream.inspector.web.app import create_app
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.errors import SqlError

HUGEINT = st.integers(-(2**127), 2**127 - 1)
VALUES = st.none() | st.booleans() | HUGEINT | st.floats() | st.text() | st.binary()


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Inspected:
    return inspected(Settings(data_dir=tmp_path_factory.mktemp("sql")))


@pytest.mark.slow
def test_a_query_shows_rows_and_a_chart(shown: Inspected) -> None:
    query = "SELECT round(reward) AS level, count(*) AS n FROM trajectories GROUP BY 1 ORDER BY 1"
    reply = shown.client.post("/sql", data={"q": query})
    text = unescape(reply.text)
    assert (
        reply.status_code == 200
        and 'id="rows">' in text
        and '<th class="r">level<th class="r">n' in text
    )
    assert "clawstream sql" in text and query in text
    assert reply.headers["hx-push-url"].startswith("/sql?q=SELECT%20round")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("SELECT * FROM read_text('/etc/passwd')", "disabled"),
        ("SELECT colour FROM trajectories", "colour"),
    ],
)
def test_what_is_wrong_or_not_allowed_is_said(shown: Inspected, query: str, why: str) -> None:
    reply = shown.client.post("/sql", data={"q": query})
    assert reply.status_code == 200 and why in reply.text and "<table" not in reply.text


@pytest.mark.slow
def test_times_that_python_lacks_are_text(shown: Inspected) -> None:
    query = "SELECT date 'infinity' AS a, [date '99999-01-01'] AS b, 1 AS c"
    text = unescape(shown.client.post("/sql", data={"q": query}).text)
    assert text.count("<value out of range") == 2


@pytest.mark.slow
def test_an_address_fills_the_query_in_and_does_not_run_it(shown: Inspected) -> None:
    text = shown.client.get("/sql", params={"q": "SELECT 1 AS one"}).text
    assert "SELECT 1 AS one" in text and 'id="rows"' not in text
    assert "<code>readiness</code>" in text and "candidates_raw" not in text
    assert "Quality in [0, 1] that holds" in text, "columns have their descriptions"


@pytest.mark.slow
def test_a_script_gets_only_the_result(shown: Inspected) -> None:
    reply = shown.client.post("/sql", data={"q": "SELECT 1 AS one"}, headers={"hx-request": "true"})
    assert reply.text.lstrip().startswith('<section id="result"') and len(reply.text) < 2000


ENDLESS = "SELECT count(*) FROM range(1000000000) a, range(1000000000) b WHERE a.range <> b.range"


@pytest.mark.slow
def test_a_cancelled_query_ends_and_leaves_its_place(shown: Inspected) -> None:
    run = SandboxedSql(shown.settings)
    run.prepare()
    cancellations = [Cancellation() for _ in range(AT_ONCE)]
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(run, ENDLESS, cancellation) for cancellation in cancellations]
        for cancellation in cancellations:
            cancellation.set()
        for query in running:
            with pytest.raises(SqlError, match="cancelled"):
                query.result()
    assert run("SELECT 7 AS n", Cancellation()).rows == [(7,)]
    run.close()


@pytest.mark.slow
def test_a_query_of_the_page_has_a_limit_of_its_own(shown: Inspected) -> None:
    run = SandboxedSql(shown.settings, limit_s=0.5)
    with pytest.raises(SqlError, match=r"longer than 0\.5 s, the limit of this page"):
        run(ENDLESS, Cancellation())
    run.close()


@pytest.mark.slow
def test_a_process_that_waits_for_a_query_ends_with_its_owner(shown: Inspected) -> None:
    def children() -> set[int]:
        return {child.pid for child in psutil.Process().children()}

    before, run = children(), SandboxedSql(shown.settings)
    run.prepare()
    (waiting,) = until(lambda: children() - before)
    run.close()
    assert waiting not in children()


class UntilLeft:
    """A query that ends when its reader leaves."""

    def prepare(self) -> None:
        """Nothing to do."""

    def __call__(self, query: str, cancellation: Cancellation) -> Result:
        left = Event()
        cancellation.ends(left.set)
        assert left.wait(60)
        raise SqlError("cancelled")


@pytest.mark.slow
def test_a_query_ends_when_its_reader_leaves(shown: Inspected) -> None:
    app = create_app(shown.parts._replace(sql=UntilLeft()))
    messages = [
        {"type": "http.request", "body": b"q=SELECT+1", "more_body": False},
        {"type": "http.disconnect"},
    ]
    scope = {
        "type": "http", "method": "POST", "path": "/sql", "raw_path": b"/sql", "query_string": b"",
        "headers": [(b"authorization", f"Bearer {KEY}".encode()), (b"host", b"test")],
        "scheme": "http", "server": ("test", 80), "client": ("test", 1), "http_version": "1.1",
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        """Nobody reads it."""

    asyncio.run(asyncio.wait_for(app(scope, receive, send), 60))
    assert not messages


def of(*rows: tuple[Any, ...]) -> Result:
    return Result([f"c{i}" for i in range(len(rows[0]))], rows, False)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (of((2, 5.0), (1, None)), {"time": False, "x": [1, 2], "series": {"c1": [None, 5]}}),
        (of((1, "a", Decimal(3)), (2, "b", math.inf)),
         {"time": False, "x": [1, 2], "series": {"c2": [3, None]}}),
        (of((datetime(1970, 1, 1, 0, 0, 9), 1), (datetime(1970, 1, 1, tzinfo=UTC), 2)),
         {"time": True, "x": [0, 9], "series": {"c1": [2, 1]}}),
        (of((date(1970, 1, 2), 1), (date(1970, 1, 1), 2)),
         {"time": True, "x": [0, 86400], "series": {"c1": [2, 1]}}),
        (of((1, 2)), None), (of((1,), (2,)), None), (of(("a", 2), ("b", 3)), None),
        (of((1, True), (2, False)), None), (of((None, 1), (2, 3)), None),
        (of((math.nan, 1), (2, 3)), None),
    ],
)  # fmt: skip
def test_the_chart_of_a_result(result: Result, expected: dict[str, Any] | None) -> None:
    made = chart_of(result)
    assert (None if made is None else json.loads(made)) == expected


@given(st.lists(st.tuples(VALUES, VALUES, st.lists(VALUES, max_size=2)), max_size=4))
def test_any_result_has_cells_and_a_chart_of_plain_json(rows: list[tuple[Any, ...]]) -> None:
    made = chart_of(Result(["a", "b", "c"], rows, False))
    assert made is None or json.loads(made, parse_constant=pytest.fail)
    assert all(len(cell(value)) <= CELL_CHARS + 1 for row in rows for value in row)
