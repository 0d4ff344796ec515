"""The pages and what they show."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any
from urllib.parse import parse_qsl, urlencode

from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent

from clawstream.inspector.marks import history
from clawstream.inspector.operations.sparkline import HEIGHT, WIDTH, path_of
from clawstream.inspector.queries import calls, group, listing, overview, tokens, trajectory
from clawstream.inspector.queries.conversation import TEXT_CHARACTERS as SHOWN_CHARACTERS
from clawstream.inspector.queries.conversation import Conversation, Turn, brief
from clawstream.inspector.queries.filters import OUTCOMES, STAGES, TEXT_CHARACTERS, parse_filters
from clawstream.inspector.queries.lake import Row
from clawstream.inspector.web import copies
from clawstream.inspector.web.dependencies import Permitted, Used
from clawstream.inspector.web.marking import Offered
from clawstream.inspector.web.rendering import render, text_of
from clawstream.schemas.blob_refs import referenced
from clawstream.schemas.errors import ForeseenError

router = APIRouter()


@router.get("/")
def runs(request: Request, parts: Used) -> Response:
    """Show all runs."""
    found = overview.runs(parts.lake)
    curves = {run["run_id"]: path_of(run["curve"], least=1e-9) for run in found}
    return render(
        request, "runs.html", runs=found, live=parts.live,
        curves=curves, width=WIDTH, height=HEIGHT,
    )  # fmt: skip


@router.get("/runs/{run_id}")
def run(request: Request, parts: Used, run_id: str, by: overview.Axis | None = None) -> Response:
    """Show the overview of a run."""
    totals = overview.totals(parts.lake, run_id)
    stages = overview.funnel(parts.lake, run_id)
    if not stages[0].calls and not totals:
        raise HTTPException(404)
    axis = by or _axis(parts.lake, run_id)
    return render(
        request, "run.html", run_id=run_id, totals=totals, stages=stages, axis=axis,
        list_of=overview.list_of, reward_fall=overview.reward_fall(parts.lake, run_id),
    )  # fmt: skip


def _axis(lake: Any, run_id: str) -> str:
    """Return the axis of a run's charts: its versions, if there are at least two."""
    found = lake.rows(
        "SELECT count(DISTINCT oldest_sync_index) AS n FROM closed WHERE run_id = $run",
        {"run": run_id},
    )
    return "version" if found[0]["n"] > 1 else "time"


@router.get("/runs/{run_id}/series.json")
def series(
    parts: Used, run_id: str, by: overview.Axis = "time", channel: str = "train"
) -> Response:
    """Return the series of a run's charts."""
    return JSONResponse(overview.series(parts.lake, run_id, by, channel))


@router.get("/trajectories")
def trajectories(request: Request, parts: Used, marking: Offered) -> Response:
    """Show the list with filters; for htmx, only the rows that follow."""
    asked = dict(request.query_params)
    filters, sort = parse_filters(asked), listing.parse_sort(asked)
    before, rows = listing.parse_place(asked), listing.parse_rows(asked)
    is_more = "hx-request" in request.headers
    page = listing.page_of(parts.lake, filters, before, sort, listing.PAGE if is_more else rows)
    following = rows + listing.PAGE
    values: dict[str, Any] = {
        "page": page, "filters": filters, "sort": sort,
        "query": urlencode({**filters.given, **({"sort": sort} if sort else {})}),
        "held": history.held_in_list(parts.lake, parts.marks, page.rows),
        "more_rows": following if following <= listing.ROWS_MAX else None,
    }  # fmt: skip
    if is_more:
        return render(request, "rows.html", **values)
    return render(
        request, "trajectories.html", outcomes=OUTCOMES, stages=STAGES, live=parts.live,
        offered=listing.channels_of(parts.lake), continued=before is not None, marking=marking,
        text_characters=TEXT_CHARACTERS, **values,
    )  # fmt: skip


@router.get("/calls")
def calls_page(request: Request, parts: Used) -> Response:
    """Show the calls that are in no trajectory."""
    given, before = calls.parse(dict(request.query_params))
    found = calls.calls_of(parts.lake, given, before)
    shown = found[: calls.PAGE]
    last = shown[-1] if len(found) > calls.PAGE else None
    following = last and {
        **given, **calls.Place(last["received_at"].isoformat(), last["id"])._asdict()
    }  # fmt: skip
    return render(
        request, "calls.html", calls=shown, following=following,
        given={name: given.get(name) for name in calls.FILTERS},
        runs=listing.channels_of(parts.lake)["run_id"], reasons=calls.reasons(parts.lake),
    )  # fmt: skip


@router.get("/group")
def group_page(request: Request, parts: Used, marking: Offered, run: str, id: str) -> Response:
    """Show the rollouts of a group side by side."""
    found = group.group_of(parts.lake, run, id, parts.chat)
    if found is None:
        raise HTTPException(404)
    members = [member for members in found["rounds"].values() for member in members]
    held = history.held_in_list(parts.lake, parts.marks, members)
    return render(request, "group.html", held=held, marking=marking, **found)


def _found(parts: Any, run_id: str, trajectory_id: str) -> trajectory.Trajectory:
    found = trajectory.find(parts.lake, run_id, trajectory_id)
    if found is None:
        raise HTTPException(404)
    return found


PAGE_CHARACTERS = 2_000_000
"""A page of a trajectory ends with the step that exceeds it."""


@router.get("/t/{run_id}/{trajectory_id}")
def trajectory_page(
    request: Request,
    parts: Used,
    marking: Offered,
    run_id: str,
    trajectory_id: str,
    first: Annotated[int | None, Query(ge=0)] = None,
    listed: Annotated[str, Query(alias="list")] = "",
) -> Response:
    """Show a trajectory as a conversation.

    Args:
        request, parts, marking: Of the application.
        run_id, trajectory_id: Its ids.
        first: Index of the first step of the page.
        listed: Filters and order of the list that led here.
    """
    came_from = dict(parse_qsl(listed))
    parse_filters(came_from)
    state = trajectory.state(parts.lake, run_id, trajectory_id)  # first: a later change reloads
    found = _found(parts, run_id, trajectory_id)
    indexes = {step["step_id"]: step["index"] for step in found.steps}
    marks = [  # in a session of the gateway, a step may be one of another trajectory
        row for row in history.of_trajectory(parts.lake, parts.marks, run_id, trajectory_id)
        if row["step_id"] is None or row["step_id"] in indexes
    ]  # fmt: skip
    page, context = trajectory.page_of(found.steps, first, found.is_open)
    turns, tools = _turns(parts, run_id, context, page)
    page = page[: len(turns)]
    places = {step["index"]: span for step, span in
              zip(found.steps, trajectory.spans(found.steps), strict=True)}  # fmt: skip
    moments = trajectory.timeline(found)
    return render(
        request, "trajectory.html", found=found, head=found.head, tools=tools, state=state,
        turns=[(step, turn, places[step["index"]])
               for step, turn in zip(page, turns, strict=True)],
        failures=defaultdict(tuple, trajectory.placed(found.failures, page, found.steps)),
        before=page[0]["index"] if page else 0, shown=SHOWN_CHARACTERS,
        after=page[-1]["index"] + 1 if page and page[-1] is not found.steps[-1] else None,
        page_steps=trajectory.PAGE, came_from=came_from,
        timeline=trajectory.moments_of(moments, page),
        main_moments=trajectory.main_moments(moments), brief=brief,
        metadata=_pretty(found.metadata_json), sql=copies.sql_of(run_id, trajectory_id),
        marks=marks, held=history.held(marks), said=history.said, indexes=indexes, marking=marking,
    )  # fmt: skip


def _turns(
    parts: Any, run_id: str, context: Sequence[Row], page: Sequence[Row]
) -> tuple[list[Turn], list[Any]]:
    """Return the turns of a page, fewer if their texts are too many, and the tools."""
    conversation = Conversation(parts.chat)
    for step in trajectory.with_bodies(parts.lake, run_id, context):
        conversation.turn(step)
    turns: list[Turn] = []
    for step in trajectory.with_bodies(parts.lake, run_id, page):
        turns.append(conversation.turn(step))
        if sum(turn.size for turn in turns) > PAGE_CHARACTERS:
            break
    return turns, [*conversation.tools.values()]


@router.get("/t/{run_id}/{trajectory_id}/step/{index}/message/{number}")
def message(parts: Used, run_id: str, trajectory_id: str, index: int, number: int) -> Response:
    """Return the whole of a message of a step, which its page shows in part."""
    step = _step(_found(parts, run_id, trajectory_id), index)
    (whole,) = trajectory.with_bodies(parts.lake, run_id, [step])
    bodies = [(whole[name] or "").encode() for name in ("request_json", "response_json")]
    chat = parts.chat(step["protocol"], *bodies)
    if chat is None or not 0 <= number < len(chat[0]):
        raise HTTPException(404)
    text = json.dumps(chat[0][number], indent=2, ensure_ascii=False).replace("\\n", "\n")
    return PlainTextResponse(text.encode("utf-8", "replace"))


@router.get("/t/{run_id}/{trajectory_id}/changes", response_class=EventSourceResponse)
async def changes(
    parts: Used, permitted: Permitted, run_id: str, trajectory_id: str, seen: str = ""
) -> AsyncIterator[ServerSentEvent]:
    """Say when the lake has more of an open trajectory than its page shows."""
    async for _ in permitted(parts.live.ticks()):
        try:
            state = await run_in_threadpool(trajectory.state, parts.lake, run_id, trajectory_id)
        except ForeseenError:  # the browser connects again
            return
        if state != seen:
            seen = state
            yield ServerSentEvent(raw_data=state, event="changed")


@router.get("/t/{run_id}/{trajectory_id}/step/{index}")
def raw_step(
    request: Request, parts: Used, run_id: str, trajectory_id: str, index: int
) -> Response:
    """Show the record of a step, and what to copy of it."""
    found = _found(parts, run_id, trajectory_id)
    step = _step(found, index)
    bounds = trajectory.log_times([step])
    rows = trajectory.recorded(parts.lake, run_id, [bounds], [step["step_id"]], "*")
    if not rows:  # erased since the page was opened
        raise HTTPException(404)
    record = {name: _value(value) for name, value in rows[0].items()}
    bodies = (rows[0]["request_json"].encode(), rows[0]["response_json"].encode())
    return render(
        request, "step.html", head=found.head, step=step,
        record=json.dumps(record, indent=2, ensure_ascii=False, default=str),
        curl=copies.curl_of(rows[0], parts.gateway_url),
        case=copies.case_of(rows[0], parts.gateway_url),
        is_whole=not any(referenced("", body) for body in bodies),
    )  # fmt: skip


@router.get("/t/{run_id}/{trajectory_id}/tokens")
def token_page(
    request: Request,
    parts: Used,
    run_id: str,
    trajectory_id: str,
    step: int = 0,
    by: tokens.Mode = "logprob",
    first: int = 0,
) -> Response:
    """Show the sampled tokens of a step in colours."""
    found = _found(parts, run_id, trajectory_id)
    chosen = _step(found, step)
    row = tokens.step_of(parts.lake, run_id, chosen)
    if row is None:
        raise HTTPException(404)
    length = len(row["response_token_ids"] or ())
    first = max(0, min(first, length))
    reason = None if chosen.get("trainable", True) else chosen["untrainable_reason"] or "excluded"
    trained = tokens.trained_of(parts.lake, found, chosen)
    return render(
        request, "tokens.html", found=found, head=found.head, step=chosen, mode=by,
        tokens=tokens.tokens_of(row, by, reason, parts.pieces, first, trained), first=first,
        trained=trained, length=length, page=tokens.PAGE, row=row, modes=tokens.MODES,
        versions=sorted({v for v in tokens.version_of_tokens(row, length) if v}),
        prompt_tokens=len(row["prompt_token_ids"] or ()), reason=reason,
    )  # fmt: skip


@router.get("/live", response_class=EventSourceResponse)
async def live(
    parts: Used, permitted: Permitted, run: str | None = None
) -> AsyncIterator[ServerSentEvent]:
    """Send the newest trajectories, of all runs or of one, whenever they change."""
    async for _ in permitted(parts.live.changes()):
        rows = await run_in_threadpool(parts.live.rows, run)
        html = text_of("live.html", rows=rows, source=parts.live.source)
        yield ServerSentEvent(raw_data=html, event="live")


def _step(found: trajectory.Trajectory, index: int) -> dict[str, Any]:
    step = next((s for s in found.steps if s["index"] == index), None)
    if step is None:
        raise HTTPException(404)
    return step


def _value(value: Any) -> Any:
    """Return a value of a record for its page: recorded JSON as JSON."""
    if isinstance(value, str) and value[:1] in "{[":
        try:
            parsed = json.loads(value)
            json.dumps(parsed, indent=2)  # may be nested too deeply
        except (ValueError, RecursionError):
            return value
        return parsed
    return value


def _pretty(text: str | None) -> str | None:
    """Indent JSON; other text stays as it is."""
    return None if text is None else json.dumps(_value(text), indent=2, ensure_ascii=False)
