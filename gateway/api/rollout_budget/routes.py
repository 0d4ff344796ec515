"""`GET /runs/<run>/demand`: what managed rollouts poll. Nothing is recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict

from gateway.api.rollout_budget.budget import DemandSource, Refusal, Seen
from gateway.asgi.messages import header_map
from gateway.attribution.resolver import Door
from gateway.errors import Forbidden, NotFound, Unprocessable
from schemas.ids import RUN_ID
from schemas.records import Channel

After = Annotated[
    int | None, Query(ge=0, description="offset of the last refusal that was handled")
]


class DemandReply(BaseModel):
    """What a run and channel ask for. Totals count from the journal's start and never fall; see docs/admission.md."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    channel: Channel
    journal_id: str
    read_to: int
    age_s: float
    ended: bool
    replacements_total: int
    replacements_by_reason: Mapping[str, int]
    refusals: tuple[Refusal, ...]
    refusals_missing: bool
    groups_admitted: int
    groups_refused: int
    next_batch_seq: int
    newest_sync_index: int | None
    loaded_sync_index: int | None
    admission_policy_version: int | None
    max_staleness: int | None
    sync_every: int | None
    batch_groups: int | None
    free_staleness_capacity: int | None


def reply_of(
    run_id: str, channel: Channel, seen: Seen, after: int | None, loaded: int | None
) -> DemandReply:
    """The reply. loaded: lowest sync index of the run that a ready engine samples with; None when no engine says so."""
    standing, policy = seen.standing, seen.standing.policy
    refusals, missing = standing.after(after)
    return DemandReply(
        run_id=run_id,
        channel=channel,
        journal_id=seen.journal_id,
        read_to=standing.read_to,
        age_s=round(seen.age_s, 3),
        ended=standing.ended,
        replacements_total=standing.replacements_total,
        replacements_by_reason=standing.replacements,
        refusals=refusals,
        refusals_missing=missing,
        groups_admitted=standing.groups_admitted,
        groups_refused=standing.groups_refused,
        next_batch_seq=standing.next_batch_seq,
        newest_sync_index=standing.newest_sync_index,
        loaded_sync_index=loaded,
        admission_policy_version=policy and policy.policy_version,
        max_staleness=policy and policy.max_staleness,
        sync_every=policy and policy.sync_every,
        batch_groups=None
        if policy is None
        else policy.batch_groups
        if channel == "train"
        else policy.val_groups,
        free_staleness_capacity=standing.free_capacity(channel, loaded),
    )


def demand_routes(
    door: Door, source: DemandSource, loaded: Callable[[str], int | None]
) -> APIRouter:
    """The route. loaded: of a run, the lowest sync index that a ready engine samples with."""
    router = APIRouter()

    @router.get("/runs/{run}/demand")
    async def demand(
        request: Request, run: str, channel: Channel = "train", after: After = None
    ) -> DemandReply:
        headers = header_map(request.scope)
        caller = door.authenticate(headers, "agent")
        if caller.session is not None and not caller.unbound:
            raise Forbidden(
                "a session key is for one trajectory; demand is of a whole run: use an API key",
                "run",
            )
        if not RUN_ID.fullmatch(run):
            raise Unprocessable(f"run: {run[:80]!r} is no run id: {RUN_ID.pattern}", "run")
        door.run_of(caller, headers, run)
        seen = await source.look(run, channel)
        if seen is None:
            raise NotFound(
                f"run {run!r} has no channel {channel!r}: no admission has made its journal yet, see `clawstream admit`",
                "run",
            )
        return reply_of(run, channel, seen, after, loaded(run))

    return router
