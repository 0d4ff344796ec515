"""Mark trajectories and steps, and take marks back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Annotated, Any, NamedTuple
from urllib.parse import parse_qsl

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import RedirectResponse

from clawstream.inspector.errors import InvalidMark, NotPermitted
from clawstream.inspector.marks import history
from clawstream.inspector.marks.mark import Mark, Target
from clawstream.inspector.marks.writer import TARGETS_MAX
from clawstream.inspector.queries.filters import Filters, parse_filters, selection_of
from clawstream.inspector.queries.lake import Lake, Row
from clawstream.inspector.queries.listing import closed_ids, is_known
from clawstream.inspector.web.access import User
from clawstream.inspector.web.dependencies import Used
from clawstream.inspector.web.forms import Form, local
from clawstream.inspector.web.rendering import render
from clawstream.runtime.topics.records import now_micros
from clawstream.schemas.records import Reward

router = APIRouter()
_TRAINABLE = {"yes": True, "no": False}


class Marking(NamedTuple):
    """What a page offers. is_on: a broker answers. may_reward: the key has the scope reward."""

    is_on: bool
    may_reward: bool


def _marking(request: Request, parts: Used) -> Marking:
    return Marking(parts.marks.connected(), request.state.user.may("reward"))


Offered = Annotated[Marking, Depends(_marking)]


@router.get("/marks")
def marks(request: Request, parts: Used, marking: Offered) -> Response:
    """Show who marked what, newest first."""
    actions = history.actions(parts.lake, parts.marks)
    return render(request, "marks.html", actions=actions, marking=marking, said=history.said)


@router.post("/marks")
def mark(request: Request, parts: Used, given: Form) -> Response:
    """Mark a step, a trajectory, a group or all trajectories that filters select."""
    made = _mark_of(given, request.state.user, parts.rewards)
    at = now_micros()
    targets = _targets(parts.lake, given)
    parts.marks.write([event for target in targets for event in made.events(target, at)])
    return RedirectResponse(local(given.get("next")), 303)


@router.post("/marks/undo")
def undo(request: Request, parts: Used, given: Form) -> Response:
    """Take back one mark, or all of an action."""
    user = request.state.user
    chosen: dict[str, Any] = {"event_id": given.get("event_id", "")}
    if "made_at" in given:
        chosen = {"by": given.get("by"), "made_at": round(_number(given, "made_at") or 0)}
    events = history.undo(parts.lake, parts.marks, user.name, now_micros(), chosen)
    if not events:
        raise InvalidMark("there is no such mark, or it is taken back already")
    _check_may_reward(user, any(isinstance(event, Reward) for event in events))
    parts.marks.write(events)
    return RedirectResponse(local(given.get("next")), 303)


def _mark_of(given: Mapping[str, str], user: User, rewards: tuple[float, float]) -> Mark:
    """Return the mark of a form. Raises InvalidMark, NotPermitted."""
    tags = [tag.strip() for tag in given.get("tags", "").split(",")]
    reward = _number(given, "reward")
    _check_may_reward(user, reward is not None)
    if reward is not None and not rewards[0] <= reward <= rewards[1]:
        raise InvalidMark(f"reward: {reward:g} is not in [{rewards[0]:g}, {rewards[1]:g}]")
    return Mark(
        by=user.name,
        quality=_number(given, "quality"),
        trainable=_TRAINABLE.get(given.get("trainable", "")),
        tags=tuple(filter(None, tags)) or None,
        note=given.get("note", "").strip() or None,
        reward=reward,
        reward_name=given.get("reward_name", "rating").strip(),
    )


def _number(given: Mapping[str, str], name: str) -> float | None:
    try:
        value = float(given[name]) if name in given else None
        if value is not None and not isfinite(value):
            raise ValueError
    except ValueError:
        raise InvalidMark(f"{name}: {given[name][:40]!r} is not a number") from None
    return value


def _check_may_reward(user: User, is_reward: bool) -> None:
    if is_reward and not user.may("reward"):
        raise NotPermitted(f"the key {user.name} lacks the scope reward")


def _targets(lake: Lake, given: Mapping[str, str]) -> list[Target]:
    """Return the targets that a form names. Raises InvalidMark."""
    run_id = given.get("run", "")
    match given.get("of"):
        case "trajectory":
            target = Target(run_id, given.get("trajectory", ""), given.get("step"))
            if not is_known(lake, *target[:3]):
                raise InvalidMark(
                    f"the lake has no {'step' if target.step_id else 'trajectory'} "
                    f"{target.step_id or target.trajectory_id} of run {run_id} (yet)"
                )
            return [target]
        case "group":
            filters = Filters(run_id=run_id, group_id=given.get("group", ""))
        case "query":
            filters = parse_filters(dict(parse_qsl(given.get("query", ""))))
        case _:
            raise InvalidMark("of: trajectory, group or query")
    selection = selection_of(lake, filters)
    if selection.indexed < 1:
        raise InvalidMark("the index of texts lacks some calls yet: try again")
    found = closed_ids(lake, selection, TARGETS_MAX + 1)
    if not found:
        raise InvalidMark("there is no such trajectory: only closed ones are found")
    if len(found) > TARGETS_MAX:
        raise InvalidMark(
            f"more than {TARGETS_MAX} trajectories: narrow the filters, or use `clawstream curate`"
        )
    if given["of"] == "query":
        _check_unchanged(found, given)
    return [Target(row["run_id"], row["trajectory_id"]) for row in found]


def _check_unchanged(found: Sequence[Row], given: Mapping[str, str]) -> None:
    """Raise InvalidMark unless the filters select what the page has shown."""
    total, newest = sum(row["rows"] for row in found), max(row["closed_at"] for row in found)
    seen = given.get("total", ""), given.get("newest", "")
    if given.get("count") != seen[0]:
        raise InvalidMark(f"count: type {seen[0]}, the number of trajectories, to confirm")
    if seen != (str(total), newest.isoformat()):
        raise InvalidMark(
            f"the filters select {total} trajectories by now, and {seen[0]} when the page was "
            "shown: load the list again"
        )
