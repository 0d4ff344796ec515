"""Convert the steps that a white-box agent of Claw-R1 submits into records. Pure.

The agent sampled elsewhere, or by POST /generate: its ids, log-probabilities and versions are
recorded as stated. `Step.protocol` is `claw-r1.submit_steps`, which marks them as stated by an
agent and not by an engine. The other fields of a step (multi_modal_data, metadata, routed_experts,
unknown fields) stay in `request_json`, as JSON.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field
from ulid import ULID

from clawstream.gateway.attribution.resolver import TrajectoryRef
from clawstream.gateway.claw_r1.bodies import TokenIds
from clawstream.gateway.errors import Unprocessable
from clawstream.gateway.protocols.request_fields import dumps
from clawstream.schemas.ids import Version, step_id
from clawstream.schemas.records import Step, VersionSpan
from clawstream.schemas.tokens import pack_ids, pack_logprobs

PROTOCOL = "claw-r1.submit_steps"
NO_LOGPROBS = "the agent submitted no log-probabilities"
PACKED = ("prompt_ids", "response_ids", "rollout_log_probs")
"""Fields of a step that are stored packed."""
RECORDS = ("reward", "is_last")
"""Fields of a step that become separate records."""
MAX_STEPS = 4096
"""Maximum steps of a request: each becomes a record, whatever its size."""

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

    prompt_ids: TokenIds
    response_ids: TokenIds
    multi_modal_data: dict[str, Any] | None = None
    reward: Finite | None = None
    rollout_log_probs: Annotated[list[LogProb], Field(fail_fast=True)] | None = None
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
class AttributedStep:
    """A step and its trajectory. index: of the step in the request, for messages."""

    index: int
    payload: StepPayload
    ref: TrajectoryRef

    def invalid(self, field: str, why: str) -> Unprocessable:
        """Return the error that names a field of this step."""
        name = f"steps.{self.index}.{field}"
        return Unprocessable(f"{name}: {why}", name)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Hold the values that all steps of a request share.

    received_at: microseconds. An idempotency key is not among them: it belongs to a request, and
    the step ids serve its purpose.
    """

    gateway_id: str
    received_at: int
    user_agent: str | None = None


def step_of(step: AttributedStep, context: RequestContext, text: str | None) -> Step:
    """Return the record of a step.

    Its id is a function of its content: the same step submitted twice is one event.

    Args:
        step: The step and its trajectory.
        context: Values of the request.
        text: Text of the response; None when it is unknown.

    Raises:
        Unprocessable: A field is invalid; the error names it.
    """
    payload, ref = step.payload, step.ref
    prompt, response, logprobs = _tokens(step)
    kept = _kept(step)
    digest = hashlib.blake2b(digest_size=10)
    for part in (ref.run_id.encode(), ref.kafka_key, prompt, response, logprobs or b"", kept):
        digest.update(len(part).to_bytes(8, "little") + part)
    # A ulid with time zero: it identifies content, not a moment.
    call_id = f"{ref.trajectory_key}~{ULID.from_bytes(bytes(6) + digest.digest())}"
    stated = _stated_version(payload, ref.run_id)
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
        versions=_spans(step, len(payload.response_ids)),
        version_first=stated,
        version_last=stated,
        user_agent=context.user_agent,
        gateway_id=context.gateway_id,
        received_at=context.received_at,
        finished_at=context.received_at,
    )


def _tokens(step: AttributedStep) -> tuple[bytes, bytes, bytes | None]:
    payload = step.payload
    prompt, response = pack_ids(payload.prompt_ids), pack_ids(payload.response_ids)
    if payload.rollout_log_probs is None:
        return prompt, response, None
    if len(payload.rollout_log_probs) != len(payload.response_ids):
        raise step.invalid(
            "rollout_log_probs",
            f"{len(payload.rollout_log_probs)} log-probabilities for "
            f"{len(payload.response_ids)} response_ids",
        )
    return prompt, response, pack_logprobs(payload.rollout_log_probs)


def _kept(step: AttributedStep) -> bytes:
    """Return all fields of a step but its tokens, as canonical JSON."""
    kept = step.payload.model_dump(exclude_unset=True, exclude={*PACKED, *RECORDS})
    path = f"steps.{step.index}"
    try:
        return dumps(kept, path, Unprocessable, sort=True)
    except Unprocessable:
        for name, value in kept.items():  # find the field that fails
            dumps(value, f"{path}.{name}", Unprocessable)
        raise


def _stated_version(payload: StepPayload, run_id: str) -> str | None:
    """Return `<run>/<n>.0` for the integer that the agent states; None when it states none.

    Claw-R1 does not report the attempt, so it is 0. Claw-R1's own flows leave `policy_version` at
    its default 0 and state the real version in their metadata.
    """
    stated = payload.policy_version
    in_metadata = (payload.metadata or {}).get("policy_version")
    if (
        not stated
        and isinstance(in_metadata, int)
        and not isinstance(in_metadata, bool)
        and 0 <= in_metadata < 10**18
    ):
        stated = in_metadata
    return str(Version(run_id, stated, 0)) if stated is not None else None


def _spans(step: AttributedStep, tokens: int) -> tuple[VersionSpan, ...]:
    spans: Sequence[StatedSpan] = step.payload.versions or ()
    if not spans:
        return ()
    bounds = [(0, 0), *((s.start, s.end) for s in spans), (tokens, tokens)]
    if any(before[1] != after[0] for before, after in pairwise(bounds)) or any(
        s.end <= s.start for s in spans
    ):
        raise step.invalid(
            "versions", f"must cover the {tokens} response_ids in order, without a hole"
        )
    return tuple(VersionSpan(version=s.version, start=s.start, end=s.end) for s in spans)
