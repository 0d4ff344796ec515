"""The query page: SQL of a user, run in a process of its own."""

from __future__ import annotations

import shlex
import time
from urllib.parse import quote

from fastapi import APIRouter, Request, Response

from inspector.queries import sql
from inspector.web.dependencies import Used
from inspector.web.forms import Form
from inspector.web.rendering import render
from schemas.errors import ForeseenError

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
    return _page(request, parts, q)


@router.post("/sql")
def run(request: Request, parts: Used, given: Form) -> Response:
    """Run a query and show its first rows."""
    query, began = given.get("q", ""), time.monotonic()
    result, error = None, ""
    try:
        result = parts.sql(query)
    except ForeseenError as failure:
        error = str(failure)
    response = _page(request, parts, query, result, error, time.monotonic() - began)
    if len(query) < ADDRESS_CHARS:
        response.headers["hx-push-url"] = f"/sql?q={quote(query)}"
    return response


def _page(
    request: Request, parts: Used, query: str, result: sql.Result | None = None, error: str = "",
    took_s: float = 0.0,
) -> Response:  # fmt: skip
    return render(
        request, "sql.html", query=query, result=result, error=error, took_s=took_s,
        schema=sql.schema_of(parts.lake), chart=sql.chart_of(result) if result else None,
        numbers=sql.numbers_of(result) if result else [],
        cell=sql.cell, examples=EXAMPLES, rows=sql.ROWS,
        command=f"clawstream sql {shlex.quote(query)} --format csv",
    )  # fmt: skip
