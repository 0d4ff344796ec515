"""Convert the steps that a white-box agent of Claw-R1 submits into records. Pure.

The agent sampled elsewhere, or by POST /generate: its ids, log-probabilities and versions are
recorded as stated. `Step.protocol` is `claw-r1.submit_steps`, which marks them as stated by an
agent and not by an engine. The other fields of a step (multi_modal_data, metadata, routed_experts,
unknown fields) stay in `request_json`, as JSON.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field
from ulid import ULID

from gateway.attribution.resolver import TrajectoryRef
from gateway.errors import BadRequest, GatewayError, Unprocessable
from gateway.protocols.request_fields import dumps
from schemas.ids import Version, step_id
from schemas.records import Step, VersionSpan
from schemas.tokens import pack_ids, pack_logprobs

PROTOCOL = "claw-r1.submit_steps"
NO_LOGPROBS = "the agent submitted no log-probabilities"
PACKED = ("prompt_ids", "response_ids", "rollout_log_probs")
"""Fields of a step that are stored packed."""
RECORDS = ("reward", "is_last")
"""Fields of a step that become separate records."""
MAX_STEPS = 4096
"""Maximum steps of a request: each becomes a record, whatever its size."""

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)]
LogProb = Annotated[float, Field(ge=-3e38, le=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False, strict=True)]
Index = Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)]


class StatedSpan(BaseModel):
    """State which version sampled response tokens [start, end), as POST /generate reports it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Annotated[str, Field(min_length=1, max_length=200)]
    start: Index
    end: Index


class StepPayload(BaseModel):
    """Hold one step in Claw-R1's format. Unknown fields are kept.

    policy_version: sync index of the weights that sampled; metadata.policy_version if it is absent
    or 0. versions: Clawstream's exact version spans.
    """

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    prompt_ids: list[TokenId]
    response_ids: list[TokenId]
    multi_modal_data: dict[str, Any] | None = None
    reward: Finite | None = None
    rollout_log_probs: list[LogProb] | None = None
    routed_experts: Any = None
    trajectory_uid: str = ""
    prompt_uid: str = ""
    step_index: Index = 0
    policy_version: Annotated[int, Field(ge=0, lt=10**18, strict=True)] | None = None
    is_last: bool = False
    metadata: dict[str, Any] | None = None
    versions: list[StatedSpan] | None = None


class Submission(BaseModel):
    """Body of POST /submit_steps."""

    steps: Annotated[list[StepPayload], Field(max_length=MAX_STEPS)]


@dataclass(frozen=True, slots=True)
class Placed:
    """Assign a step to its trajectory. at: index of the step in the request, for messages."""

    at: int
    said: StepPayload
    trajectory: TrajectoryRef

    def wrong(self, field: str, why: str) -> Unprocessable:
        """Return the error that names a field of this step."""
        name = f"steps.{self.at}.{field}"
        return Unprocessable(f"{name}: {why}", name)


@dataclass(frozen=True, slots=True)
class Request:
    """Hold the values that all steps of a request share.

    received_at: microseconds. An idempotency key is not among them: it belongs to a request, and
    the step ids serve its purpose.
    """

    gateway_id: str
    received_at: int
    user_agent: str | None = None


def misplaced(at: int, error: GatewayError) -> GatewayError:
    """Return the error of a step without a valid trajectory, with the step's own field names."""
    if not isinstance(error, BadRequest):
        return error
    field = {"group_id": "prompt_uid", "run_id": None}.get(error.param or "", "trajectory_uid")
    return (
        Unprocessable(f"steps.{at}.{field}: {error.message}", f"steps.{at}.{field}")
        if field
        else error
    )


def in_order(steps: Iterable[Placed]) -> list[Placed]:
    """Sort steps by step_index, so that assemble finds this order on the log."""
    return sorted(steps, key=lambda s: s.said.step_index)


def step_of(placed: Placed, request: Request, text: str | None) -> Step:
    """Return the record of a step.

    Its id is a function of its content: the same step submitted twice is one event.

    Args:
        placed: The step and its trajectory.
        request: Values of the request.
        text: Text of the response; None when it is unknown.

    Raises:
        Unprocessable: A field is invalid; the error names it.
    """
    said, ref = placed.said, placed.trajectory
    prompt, response, logprobs = _tokens(placed)
    kept = _kept(placed)
    digest = hashlib.blake2b(digest_size=10)
    for part in (ref.run_id.encode(), ref.kafka_key, prompt, response, logprobs or b"", kept):
        digest.update(len(part).to_bytes(8, "little") + part)
    # A ulid with time zero: it identifies content, not a moment.
    call_id = f"{ref.trajectory_key}~{ULID.from_bytes(bytes(6) + digest.digest())}"
    stated = _stated_version(said, ref.run_id)
    return Step(
        step_id=step_id(call_id, 0),
        run_id=ref.run_id,
        trajectory_key=ref.trajectory_key,
        call_id=call_id,
        choice_index=0,
        group_id=ref.group_id,
        channel=ref.channel,
        protocol=PROTOCOL,
        model="",
        status="ok",
        streamed=False,
        request_json=kept,
        response_json=orjson.dumps({"role": "assistant", "content": text}),
        prompt_token_ids=prompt,
        response_token_ids=response,
        response_logprobs=logprobs,
        tokens_absent_reason=NO_LOGPROBS if logprobs is None else None,
        versions=_spans(placed, len(said.response_ids)),
        version_first=stated,
        version_last=stated,
        user_agent=request.user_agent,
        gateway_id=request.gateway_id,
        received_at=request.received_at,
        finished_at=request.received_at,
    )


def _tokens(placed: Placed) -> tuple[bytes, bytes, bytes | None]:
    said = placed.said
    if said.rollout_log_probs is None:
        return pack_ids(said.prompt_ids), pack_ids(said.response_ids), None
    if len(said.rollout_log_probs) != len(said.response_ids):
        raise placed.wrong(
            "rollout_log_probs",
            f"{len(said.rollout_log_probs)} log-probabilities for "
            f"{len(said.response_ids)} response_ids",
        )
    return (
        pack_ids(said.prompt_ids),
        pack_ids(said.response_ids),
        pack_logprobs(said.rollout_log_probs),
    )


def _kept(placed: Placed) -> bytes:
    """Return all fields of a step but its tokens, as canonical JSON."""
    kept = placed.said.model_dump(exclude_unset=True, exclude={*PACKED, *RECORDS})
    step = f"steps.{placed.at}"
    try:
        return dumps(kept, step, Unprocessable, sort=True)
    except Unprocessable:
        for name, value in kept.items():  # find the field that fails
            dumps(value, f"{step}.{name}", Unprocessable)
        raise


def _stated_version(said: StepPayload, run_id: str) -> str | None:
    """Return `<run>/<n>.0` for the integer that the agent states; None when it states none.

    Claw-R1 does not report the attempt, so it is 0. Claw-R1's own flows leave `policy_version` at
    its default 0 and state the real version in their metadata.
    """
    stated = said.policy_version
    in_metadata = (said.metadata or {}).get("policy_version")
    if (
        not stated
        and isinstance(in_metadata, int)
        and not isinstance(in_metadata, bool)
        and 0 <= in_metadata < 10**18
    ):
        stated = in_metadata
    return str(Version(run_id, stated, 0)) if stated is not None else None


def _spans(placed: Placed, tokens: int) -> tuple[VersionSpan, ...]:
    spans: Sequence[StatedSpan] = placed.said.versions or ()
    if not spans:
        return ()
    bounds = [(0, 0), *((s.start, s.end) for s in spans), (tokens, tokens)]
    if any(before[1] != after[0] for before, after in pairwise(bounds)) or any(
        s.end <= s.start for s in spans
    ):
        raise placed.wrong(
            "versions", f"must cover the {tokens} response_ids in order, without a hole"
        )
    return tuple(VersionSpan(version=s.version, start=s.start, end=s.end) for s in spans)
