"""The operations page: consumers, processes and workers now, and what they did over time."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent

from clawstream.inspector.operations.observation import (
    Consumer,
    Observation,
    Weights,
    consumer_name,
)
from clawstream.inspector.operations.sparkline import HEIGHT, WIDTH, path_of
from clawstream.inspector.operations.time_range import RANGES, TimeRange, time_range
from clawstream.inspector.queries.activity import (
    CHARTS,
    newest_letters,
    newest_version,
    open_dead_letters,
)
from clawstream.inspector.queries.lake import Row
from clawstream.inspector.web.dependencies import Permitted, Used
from clawstream.inspector.web.rendering import block_of, link, render
from clawstream.schemas.errors import ForeseenError

router = APIRouter()
TEMPLATE = "operations.html"
LIVE_PARTS = (
    "problems",
    "facts",
    "consumers",
    "others",
    "processes",
    "workers",
    "letters",
    "count",
)
"""Blocks of the template that are sent again when they change, by the event of their name.

None is ever empty: browsers drop an event without data.
"""
SPARK_S = 15.0
"""A lag of fewer seconds stays low in the small charts: it is that of a healthy consumer."""
LETTERS = 50
"""Newest open dead letters that are listed."""
NOT_ASKED = "it has not been asked yet"
LAGS = {
    "lag_seconds": "Lag of each consumer group, seconds",
    "lag_records": "Lag of each consumer group, records",
    "versions_behind": "Rollout workers, versions behind",
}
COUNTS = dict(
    zip(
        CHARTS,
        ("Calls", "Trajectories closed", "Groups decided", "Versions published", "Dead letters"),
        strict=True,
    )
)


@router.get("/operations")
def page(request: Request, parts: Used, range: str = "", until: str = "") -> Response:
    """Show the installation now, and a time range of its history."""
    shown = time_range(range, until, time.time())
    return render(
        request, TEMPLATE, shown=shown, ranges=RANGES, lags=LAGS, counts=COUNTS,
        address=_query(shown), permalink=_permalink(shown), **_state(parts, shown),
    )  # fmt: skip


@router.get("/operations/changes", response_class=EventSourceResponse)
async def changes(
    parts: Used, permitted: Permitted, range: str = "", until: str = ""
) -> AsyncIterator[ServerSentEvent]:
    """Send the parts of the page that have changed, after each observation."""
    sent: dict[str, str] = {}
    async for _ in permitted(parts.operations.changes()):
        shown = time_range(range, until, time.time())
        state = await run_in_threadpool(_state, parts, shown)
        for name in LIVE_PARTS:
            html = block_of(TEMPLATE, name, **state)
            if sent.get(name) != html:
                sent[name] = html
                yield ServerSentEvent(raw_data=html, event=name)


@router.get("/operations/series.json")
def series(parts: Used, range: str = "", until: str = "") -> Response:
    """Return the lines of all charts of a time range."""
    shown = time_range(range, until, time.time())
    history = parts.operations.history
    lines = {kind: history.lines(kind, shown.from_s, shown.to_s) for kind in LAGS}
    lines |= parts.activity(shown.from_s, shown.to_s, shown.bucket_s)
    charts = {name: {"x": x, "series": found} for name, (x, found) in lines.items()}
    times = {"from": shown.from_s, "to": shown.to_s, "permalink": _permalink(shown)}
    return JSONResponse({**times, "charts": charts})


def _permalink(shown: TimeRange) -> str:
    return link("/operations", range=shown.name, until=shown.until)


def _query(shown: TimeRange) -> dict[str, str | None]:
    return {"range": shown.name, "until": None if shown.is_live else shown.until}


def _state(parts: Any, shown: TimeRange) -> Mapping[str, Any]:
    """Return what the live blocks show: the newest observation, and what only the lake knows."""
    found: Observation = parts.operations.latest or Observation(time.time(), NOT_ASKED)
    lake_error, committed_s, listed = "", None, list[Row]()
    weights, letters = found.weights, found.dead_letters
    try:
        committed_s = parts.lake.newest_commit_s()
        listed = newest_letters(parts.lake, LETTERS)
        if found.kafka_error is not None:
            newest = newest_version(parts.lake)
            weights = newest and Weights(*newest)
            letters = open_dead_letters(parts.lake)
    except ForeseenError as error:
        lake_error = str(error)
    notes = [*found.notes, *(f"{table} is not up to date" for table in parts.lake.failed)]
    lines = parts.operations.history.lines("consumer", shown.from_s, shown.to_s).series
    return {
        "found": found, "weights": weights, "letters": letters, "committed_s": committed_s,
        "listed": listed, "notes": notes, "lake_error": lake_error, "now_s": time.time(),
        "width": WIDTH, "height": HEIGHT,
        "ours": [(c, *_spark(lines, c)) for c in found.consumers if c.status is not None],
        "others": [c for c in found.consumers if c.status is None],
    }  # fmt: skip


def _spark(lines: Mapping[str, list[float | None]], consumer: Consumer) -> tuple[str, float]:
    """Return the path of a consumer's line, and its highest value."""
    values = lines.get(consumer_name(consumer), [])
    return path_of(values, SPARK_S), max((v for v in values if v is not None), default=0.0)
