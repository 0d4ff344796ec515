"""The admission policy of a run: its fields, what another one would admit, and its history."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import RedirectResponse

from clawstream.inspector.errors import LogAbsent, NotPermitted
from clawstream.inspector.queries import policy
from clawstream.inspector.web.dependencies import Used
from clawstream.inspector.web.forms import Form
from clawstream.inspector.web.rendering import render
from clawstream.schemas.errors import ForeseenError
from clawstream.schemas.settings import PolicySettings

router = APIRouter()
FIELDS = {
    name: str(field.description) for name, field in PolicySettings.model_fields.items()
}  # fmt: skip
FIXED = "sync_every"
"""The field that is fixed for a run."""


@router.get("/runs/{run_id}/policy")
def page(request: Request, parts: Used, run_id: str) -> Response:
    """Show the policy; with fields in the address, also what it would admit with these."""
    given = {name: text for name, text in request.query_params.items() if name in FIELDS}
    return _page(request, parts, run_id, given)


@router.post("/runs/{run_id}/policy")
def publish(request: Request, parts: Used, run_id: str, given: Form) -> Response:
    """Publish the policy with the fields of the form."""
    user = request.state.user
    if not user.may("admin"):
        raise NotPermitted(f"the key {user.name} lacks the scope admin, which sets policies")
    if not parts.marks.connected():
        raise LogAbsent("a policy is published on Kafka, which does not answer")
    # A form does not send empty fields: they are null.
    filled = dict.fromkeys(FIELDS.keys() - {FIXED}, "") | given
    changes = policy.changes_of(_log(parts, run_id).newest, filled)
    try:
        version = int(given.get("version", "0"))
        parts.policies.publish(run_id, changes, user.name, version)
    except (ForeseenError, ValueError) as error:
        return _page(request, parts, run_id, filled, str(error), 422)
    return RedirectResponse(f"/runs/{run_id}/policy", 303)


def _log(parts: Any, run_id: str) -> policy.PolicyLog:
    found: policy.PolicyLog | None = parts.policies.of(run_id)
    if found is None:
        raise HTTPException(404)
    return found


def _page(
    request: Request, parts: Any, run_id: str, given: dict[str, str], error: str = "",
    status: int = 200,
) -> Response:  # fmt: skip
    log = _log(parts, run_id)
    changes, after, compared = policy.changes_of(log.newest, given), None, None
    if changes and not error:
        try:
            made = parts.policies.changed(run_id, changes)
            compared = policy.preview(parts.lake, run_id, log.newest, made)
            after = made
        except ForeseenError as failure:
            error, status = str(failure), 422
    texts = policy.texts_of(log.newest)
    older = [None, *log.versions]
    history = [
        (version, policy.differences(before, version) if before else [])
        for before, version in zip(older, log.versions, strict=False)
    ]
    return render(
        request, "policy.html", status, run_id=run_id, log=log, fields=FIELDS, fixed=FIXED,
        texts=texts | {n: t for n, t in given.items() if n in texts}, changes=changes, error=error,
        changed=policy.differences(log.newest, after) if after else [], compared=compared,
        history=history[::-1], is_on=parts.marks.connected(),
        may_publish=request.state.user.may("admin"),
    )  # fmt: skip
