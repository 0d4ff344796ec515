"""The query page: SQL of a user, run in a process of its own."""

from __future__ import annotations

import asyncio
import shlex
import time
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from clawstream.inspector.queries import sql
from clawstream.inspector.web.dependencies import Used
from clawstream.inspector.web.forms import Form
from clawstream.inspector.web.rendering import render
from clawstream.schemas.errors import ForeseenError

router = APIRouter()
ADDRESS_CHARS = 2000
"""A longer query is not put into the address."""
EXAMPLES = (
    ("Reward over time", "SELECT date_trunc('minute', closed_at) AS minute, avg(reward) AS reward\n"
     "FROM trajectories GROUP BY 1 ORDER BY 1"),
    ("Why trajectories are not ready", "SELECT unmet_conditions, count(*) AS trajectories\n"
     "FROM readiness WHERE NOT ready GROUP BY 1 ORDER BY 2 DESC"),
    ("Newest marks", "SELECT last_at, last_by, trajectory_id, step_id, quality, trainable, tags\n"
     "FROM curated ORDER BY last_at DESC LIMIT 50"),
)  # fmt: skip


@router.get("/sql")
def page(request: Request, parts: Used, q: str = "") -> Response:
    """Show the query in the address. Only the form runs it."""
    parts.sql.prepare()
    return render(request, "sql.html", **_values(q), **_around(parts))


@router.post("/sql")
async def run(request: Request, parts: Used, given: Form) -> Response:
    """Run a query and show its first rows; for htmx, only these. It ends when its reader leaves."""
    query, began = given.get("q", ""), time.monotonic()
    cancellation = sql.Cancellation()
    watch = asyncio.create_task(_until_left(request, cancellation))
    result, error = None, ""
    try:
        result = await run_in_threadpool(parts.sql, query, cancellation)
    except ForeseenError as failure:
        error = str(failure)
    finally:
        watch.cancel()
    parts.sql.prepare()
    values = _values(query, result, error, time.monotonic() - began)
    if "hx-request" in request.headers:
        response = render(request, "sql_result.html", **values)
    else:
        around = await run_in_threadpool(_around, parts)
        response = render(request, "sql.html", **values, **around)
    if len(query) < ADDRESS_CHARS:
        response.headers["hx-push-url"] = f"/sql?q={quote(query)}"
    return response


async def _until_left(request: Request, cancellation: sql.Cancellation) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    cancellation.set()


def _values(
    query: str, result: sql.Result | None = None, error: str = "", took_s: float = 0.0
) -> dict[str, Any]:
    return {
        "query": query, "result": result, "error": error, "took_s": took_s, "rows": sql.ROWS,
        "chart": sql.chart_of(result) if result else None,
        "numbers": sql.numbers_of(result) if result else [], "cell": sql.cell,
        "command": f"clawstream sql {shlex.quote(query)} --format csv",
    }  # fmt: skip


def _around(parts: Any) -> dict[str, Any]:
    return {"schema": sql.schema_of(parts.lake), "examples": EXAMPLES}
