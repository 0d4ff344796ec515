"""Bodies of the requests about sessions, trajectories, rewards and curations, and their parsing."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from clawstream.gateway.errors import BadRequest, Unprocessable
from clawstream.gateway.protocols.request_fields import dumps
from clawstream.schemas.records import Channel, RewardSource
from clawstream.schemas.records.parts import NAME_CHARS, TAGS_MAX
from clawstream.schemas.records.rewards import COMPLETION_MAX

Value = Annotated[float, Field(allow_inf_nan=False, strict=True)]
Text = Annotated[str, Field(min_length=1, max_length=NAME_CHARS)]
Reason = Annotated[str, Field(max_length=2000)]
Size = Annotated[int, Field(ge=1, le=100_000, strict=True)]
Round = Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)]
M = TypeVar("M", bound=BaseModel)
MAX_ERRORS = 1000
NOT_FINITE = re.compile(rb"NaN|Infinity|[eE]\+?\d{3}|\d{309}")
"""JSON that may have a number outside of the range of a double; also finds it in texts."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Register(_Body):
    """Body that describes a trajectory before its first call.

    metadata: facts about the task for reward functions.
    """

    channel: Channel | None = None
    group_size: Size | None = None
    round: Round | None = None
    metadata: dict[str, Any] | None = None


class OpenSession(Register):
    """Body of POST /sessions. trajectory_key: a new one by default."""

    run_id: str | None = None
    group_id: str | None = None
    trajectory_key: str | None = None


class Complete(_Body):
    """Body that ends a trajectory.

    reward: the reward from the environment, if any. rewards: several by name, instead of reward.
    step_id: a step of the trajectory, required where the gateway assigned the key.
    """

    step_id: str | None = None
    reward: Value | None = None
    rewards: Annotated[dict[Text, Value], Field(max_length=COMPLETION_MAX)] | None = None
    outcome: Literal["completed", "failed", "abandoned", "replaced"] = "completed"
    reason: Reason | None = None
    channel: Channel | None = None


class GiveReward(_Body):
    """Body of POST /rewards: a reward of a trajectory or, with step_id, of a step.

    value null: explicitly no reward; `reason` is then required.
    """

    trajectory_id: str | None = None
    step_id: str | None = None
    run_id: str | None = None
    source: RewardSource
    name: Text
    value: Value | None = None
    reason: Reason | None = None
    function_version: Text
    reward_revision: Annotated[int, Field(ge=0, le=2**53, strict=True)] = 0
    by: Text | None = None
    detail: Any = None


class Curate(_Body):
    """Body of POST /curations: a curation of a trajectory or, with step_id, of a step.

    An omitted field keeps its value. takes_back: event id of an earlier curation of the same
    target, which no longer counts; only with a note. by: the API key's name by default.
    """

    trajectory_id: str | None = None
    step_id: str | None = None
    run_id: str | None = None
    quality: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True)] | None = None
    trainable: Annotated[bool, Field(strict=True)] | None = None
    tags: Annotated[tuple[Text, ...], Field(max_length=TAGS_MAX)] | None = None
    note: Reason | None = None
    takes_back: Text | None = None
    by: Text | None = None


ERRORS_TOLD = 5
"""Of one body, in the message; the first one's field is the error's."""


def json_of(value: Any, field: str) -> bytes | None:
    """Return a value as stored JSON; None stays None. Raises Unprocessable, see `dumps`."""
    return None if value is None else dumps(value, field, Unprocessable)


def read_as(model: type[M], body: bytes) -> M:
    """Parse a request's body. Raises BadRequest or Unprocessable that names the field."""
    try:
        found = model.model_validate_json(body)
        if NOT_FINITE.search(body):
            orjson.loads(body)  # pydantic reads them, where a field may have any value
        return found
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"body: not JSON: {error}", "body") from error
    except ValidationError as error:
        if (wrong := error.error_count()) > MAX_ERRORS:  # to list them takes longer than to parse
            raise Unprocessable(
                f"body: {wrong} fields have a wrong name or value", "body"
            ) from None
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        if errors[0]["type"] == "json_invalid":
            raise BadRequest(f"body: not JSON: {errors[0]['msg']}", "body") from error
        fields = [".".join(map(str, one["loc"])) or "body" for one in errors]
        told = [f"{field}: {one['msg']}" for field, one in zip(fields, errors, strict=True)]
        raise Unprocessable("; ".join(told[:ERRORS_TOLD]), fields[0]) from error


def in_openapi(model: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI description of a body that the route parses itself."""
    schema = model.model_json_schema()
    named = schema.pop("$defs", {})

    def inline(value: Any) -> Any:
        if isinstance(value, dict):
            if ref := value.get("$ref"):
                return inline(named[ref.rpartition("/")[2]])
            return {k: inline(v) for k, v in value.items()}
        return [inline(v) for v in value] if isinstance(value, list) else value

    content = {"application/json": {"schema": inline(schema)}}
    return {"requestBody": {"required": True, "content": content}}
