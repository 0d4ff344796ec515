"""Serve `GET /runs/<run>/demand`, which managed rollouts poll. Records nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict

from clawstream.gateway.api.dependencies import principal_with
from clawstream.gateway.api.rollout_budget.budget import BudgetReading, BudgetSource
from clawstream.gateway.asgi.messages import header_map
from clawstream.gateway.auth.authenticator import Principal
from clawstream.gateway.errors import BudgetUnknown, Forbidden, NotFound, Unprocessable
from clawstream.gateway.proxy.services import Services
from clawstream.schemas.ids import RUN_ID
from clawstream.schemas.records import BudgetRefusal, Channel

After = Annotated[
    int | None, Query(ge=0, description="offset of the last refusal that was handled")
]


class BudgetReply(BaseModel):
    """Describe the rollout budget of a run and channel.

    Totals count from the journal's start and never fall; see docs/admission.md.
    """

    model_config = ConfigDict(frozen=True)

    run_id: str
    channel: Channel
    journal_id: str
    read_to: int
    age_s: float
    ended: bool
    replacements_total: int
    replacements_by_reason: Mapping[str, int]
    refusals: tuple[BudgetRefusal, ...]
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
    validation_due: int | None


def reply_of(
    reading: BudgetReading, after: int | None, loaded: int | None, val_every: int | None
) -> BudgetReply:
    """Return the reply.

    Args:
        reading: The budget as last read.
        after: Offset of the last refusal that the client handled; None: from the start.
        loaded: Lowest sync index of the run that a ready engine samples with; None when no engine
            reports one.
        val_every: Versions between two validation rounds; None: none are asked for.
    """
    budget = reading.budget
    refusals, missing = reading.refusals_after(after)
    return BudgetReply(
        run_id=budget.run_id,
        channel=budget.channel,
        journal_id=budget.journal_id,
        read_to=budget.read_to,
        age_s=round(reading.age_s, 3),
        ended=reading.ended,
        replacements_total=budget.replacements_total,
        replacements_by_reason=budget.replacements,
        refusals=refusals,
        refusals_missing=missing,
        groups_admitted=budget.groups_admitted,
        groups_refused=budget.groups_refused,
        next_batch_seq=budget.next_batch_seq,
        newest_sync_index=reading.newest_sync_index,
        loaded_sync_index=loaded,
        admission_policy_version=budget.policy_version,
        max_staleness=budget.max_staleness,
        sync_every=budget.sync_every,
        batch_groups=budget.batch_groups,
        free_staleness_capacity=reading.free_capacity(loaded),
        validation_due=reading.validation_due(val_every, loaded),
    )


def rollout_budget_routes(
    services: Services,
    source: BudgetSource | None,
    loaded: Callable[[str], int | None],
    val_every: int | None,
    last_version: Callable[[str], int | None],
) -> APIRouter:
    """Return the route.

    Args:
        services: Authenticate the caller, and check that its key may read the run.
        source: Gives the budget of a run and channel; None: every budget is unknown.
        loaded: Given a run, returns the lowest sync index that a ready engine samples with.
        val_every: See `reply_of`.
        last_version: Given a run, returns the sync index at which its training ends.
    """
    router, agent = APIRouter(), principal_with(services, "agent")

    @router.get("/runs/{run}/demand")
    async def budget(
        request: Request,
        run: str,
        channel: Channel = "train",
        after: After = None,
        caller: Principal = agent,
    ) -> BudgetReply:
        if caller.session is not None and not caller.unbound:
            raise Forbidden(
                "a session key is for one trajectory; the rollout budget is of a whole run: "
                "use an API key",
                "run",
            )
        if not RUN_ID.fullmatch(run):
            raise Unprocessable(f"run: {run[:80]!r} is no run id: {RUN_ID.pattern}", "run")
        services.trajectories.run_of(caller, header_map(request.scope), run)
        if source is None:
            raise BudgetUnknown("this gateway follows no budgets")
        reading = await source.get(run, channel)
        if reading is None:
            raise NotFound(
                f"run {run!r} has no channel {channel!r}: its admission has not started yet, "
                "see `clawstream admit`",
                "run",
            )
        reading = replace(reading, last_version=last_version(run))
        return reply_of(reading, after, loaded(run), val_every)

    return router
