"""Serve Claw-R1's HTTP API for white-box agents.

Routes: /submit_steps, /generate, /compute_reward, /init_trajectory. `gateway.api.control` serves
the other routes of its black-box agents (register_trajectory, complete_trajectory). docs/claw-r1.md
lists each route with the differences and their reasons.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.api.control import Complete, GiveReward, Recorder, Register, public_url
from gateway.asgi.client_disconnect import DisconnectWatcher, Receive
from gateway.asgi.messages import header_map
from gateway.auth.authenticator import Principal
from gateway.auth.key_limits import Counted
from gateway.capture.engine_tokens import NO_TOKENS, CapturedTokens
from gateway.capture.steps import ABORTED
from gateway.claw_r1.reward import ComputeReward, Judge, TextOf
from gateway.claw_r1.steps import (
    Placed,
    StepPayload,
    Submission,
    TokenId,
    in_order,
    misplaced,
    step_of,
)
from gateway.claw_r1.steps import Request as SubmitRequest
from gateway.durability.record_writer import Event
from gateway.engines.registry import EngineSpec
from gateway.errors import BadRequest, ClientGone, GatewayError, Unprocessable, UpstreamFailed
from gateway.protocols.base import Tokens
from gateway.protocols.openai_completions import OpenAICompletions
from gateway.protocols.request_fields import dumps
from gateway.proxy.failed_calls import Attempt, engine_failure, failure_of
from gateway.proxy.forwarding import FORWARDED, returned
from gateway.proxy.services import Services, held_body
from gateway.proxy.token_limits import refuse_longer
from schemas import engine_frames
from schemas.ids import parse_version
from schemas.records import Channel, Step
from schemas.settings import GatewaySettings
from schemas.tokens import unpack_ids, unpack_logprobs

LARGE_BODIES = frozenset({"/submit_steps", "/generate", "/compute_reward"})
"""Paths whose bodies carry token ids: gateway.max_body_bytes limits them, as model calls."""
THREAD_BYTES = 1 << 14
"""Submissions above this size are read in a thread.

1 MB of ids takes 20 ms to read, and so do 16 KB of tiny steps.
"""
PREFIX_IDS = 128
"""Number of first prompt ids that select the engine.

Calls with equal ids go to the same engine, which has them in its cache.
"""
OURS = frozenset(
    {"prompt", "stream", "n", "best_of", "echo", "suffix", "prompt_embeds", "use_beam_search"}
)
"""Parameters of completions that POST /generate does not accept: it returns one whole reply."""
DEFAULTS: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
"""Claw-R1's defaults, sent explicitly because a model may have other defaults."""
COMPLETIONS = OpenAICompletions()
PROTOCOL = "claw-r1.generate"
"""Protocol name of a failed call of POST /generate."""
M = TypeVar("M", bound=BaseModel)


class Generate(BaseModel):
    """Body of POST /generate. sampling_params: those of vLLM's completions."""

    model_config = ConfigDict(frozen=True)

    prompt_ids: Annotated[list[TokenId], Field(min_length=1)]
    sampling_params: dict[str, Any] = {}
    image_data: list[Any] | None = None
    video_data: list[Any] | None = None


def read_as(model: type[M], body: bytes) -> M:
    """Parse a request's body. Raises BadRequest or Unprocessable that names the field."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"])) or "body"
        if first["type"] == "json_invalid":
            raise BadRequest("body: not JSON", "body") from error
        raise Unprocessable(f"{field}: {first['msg']}", field) from error


def in_openapi(model: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI description of a body that the route parses itself."""
    schema = model.model_json_schema()
    named = schema.pop("$defs", {})

    def inline(value: Any) -> Any:
        if isinstance(value, dict):
            ref = value.get("$ref")
            return (
                inline(named[ref.rpartition("/")[2]])
                if ref
                else {k: inline(v) for k, v in value.items()}
            )
        return [inline(v) for v in value] if isinstance(value, list) else value

    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": inline(schema)}},
        }
    }


def claw_r1_routes(services: Services) -> APIRouter:
    """Return the routes.

    Raises:
        SettingsError: The reward function or the tokenizer of the settings does not exist.
    """
    gateway = services.settings.gateway
    text_of = _text_of(gateway)
    judge, submitter, generator = (
        Judge(services.settings, text_of),
        Submitter(services, text_of),
        Generator(services),
    )

    @asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        yield
        judge.close()
        submitter.close()

    router = APIRouter(lifespan=lifespan)

    @asynccontextmanager
    async def opened(request: Request) -> AsyncIterator[tuple[Principal, bytes]]:
        """Authenticate the caller, then read its body, which counts as held within the block."""
        caller = services.authenticator.authenticate(header_map(request.scope), "agent")
        async with held_body(request.receive, services) as body:
            yield caller, body

    @router.post("/submit_steps", openapi_extra=in_openapi(Submission))
    async def submit_steps(request: Request, channel: Channel | None = None) -> dict[str, int]:
        async with opened(request) as (caller, body):
            return {
                "accepted": await submitter.submit(caller, header_map(request.scope), body, channel)
            }

    @router.post("/generate", openapi_extra=in_openapi(Generate))
    async def generate(request: Request) -> Response:
        return await generator.serve(header_map(request.scope), request.receive)

    @router.post("/compute_reward", openapi_extra=in_openapi(ComputeReward))
    async def compute_reward(request: Request) -> dict[str, Any]:
        async with opened(request) as (caller, body):
            return await judge.judge(
                read_as(ComputeReward, body),
                services.trajectories.run_of(caller, header_map(request.scope)),
            )

    @router.post("/init_trajectory")
    async def init_trajectory(request: Request) -> dict[str, str]:
        services.authenticator.authenticate(header_map(request.scope), "agent")
        uid = uuid.uuid4().hex
        return {"trajectory_uid": uid, "base_url": f"{public_url(gateway, request)}/{uid}/{uid}/v1"}

    return router


def _text_of(gateway: GatewaySettings) -> TextOf | None:
    if gateway.tokenizer_path is None:
        return None
    from gateway.claw_r1 import tokenizer  # only this module needs the library

    return tokenizer.TextOf(gateway.tokenizer_path)


class Submitter:
    """Serve POST /submit_steps.

    The steps, their rewards, and the openings and ends of their trajectories are durable before the
    reply.
    """

    def __init__(self, services: Services, text_of: TextOf | None) -> None:
        self._services, self._text_of, self._recorder = services, text_of, Recorder(services)
        self._thread = ThreadPoolExecutor(1, "submit-steps")

    async def submit(
        self, caller: Principal, headers: Mapping[str, str], body: bytes, channel: Channel | None
    ) -> int:
        """Record the steps, and return their number.

        Raises:
            GatewayError: Some steps may be recorded; submitting all again is harmless.
        """
        if len(body) < THREAD_BYTES:
            steps, events = self._read(caller, headers, body, channel)
        else:
            work: Callable[..., tuple[int, list[Event]]] = self._read
            loop = asyncio.get_running_loop()
            steps, events = await loop.run_in_executor(
                self._thread, work, caller, headers, body, channel
            )
        if events:
            await self._recorder.record(events)
        self._services.metrics.steps_recorded.labels("ok").inc(steps)
        return steps

    def close(self) -> None:
        """Stop the thread without waiting."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _read(
        self, caller: Principal, headers: Mapping[str, str], body: bytes, channel: Channel | None
    ) -> tuple[int, list[Event]]:
        services = self._services
        request = SubmitRequest(
            services.settings.gateway.gateway_id, services.clock.micros(), headers.get("user-agent")
        )
        placed = in_order(
            self._place(caller, headers, at, said, channel)
            for at, said in enumerate(read_as(Submission, body).steps)
        )
        steps = [(p, step_of(p, request, self._text(p.said))) for p in placed]
        return len(steps), self._events(caller, steps)

    def _place(
        self,
        caller: Principal,
        headers: Mapping[str, str],
        at: int,
        said: StepPayload,
        channel: Channel | None,
    ) -> Placed:
        try:
            found = self._services.trajectories.resolve(
                caller, headers, said.trajectory_uid or None, said.prompt_uid or None
            )
        except GatewayError as error:
            raise misplaced(at, error) from error
        return Placed(at, said, replace(found, channel=channel or found.channel))

    def _text(self, said: StepPayload) -> str | None:
        return self._text_of(said.response_ids) if self._text_of is not None else None

    def _events(self, caller: Principal, steps: Sequence[tuple[Placed, Step]]) -> list[Event]:
        """Return the events in log order: openings, steps, ends; rewards have their own log.

        The reward of a last step is the trajectory's, as in Claw-R1's own complete_trajectory.
        """
        recorder, authenticator = self._recorder, self._services.authenticator
        opened: dict[bytes, Event] = {}
        ended: dict[bytes, Event] = {}
        rewards: list[Event] = []
        for placed, step in steps:
            said, ref = placed.said, placed.trajectory
            if said.metadata and ref.kafka_key not in opened:
                opened[ref.kafka_key] = recorder.opened(ref, Register(metadata=said.metadata))
            if said.is_last:
                (ended[ref.kafka_key],) = recorder.ended(ref, Complete())
            if said.reward is None:
                continue
            if said.is_last:
                authenticator.require_completion_reward(caller)
                name, step_id = "complete_trajectory", None
            else:
                authenticator.require(caller, "reward")
                name, step_id = "submit_steps", step.step_id
            reward = GiveReward(
                source="env", name=name, function_version="1", step_id=step_id, value=said.reward
            )
            rewards.append(recorder.reward(ref, reward, f"steps.{placed.at}.reward", caller.name))
        return [*opened.values(), *(step for _, step in steps), *rewards, *ended.values()]


class Generator:
    """Serve POST /generate: tokens in, tokens out, by one completions call.

    It records nothing: the agent submits its steps.
    """

    def __init__(self, services: Services) -> None:
        self._services = services

    async def serve(self, headers: Mapping[str, str], receive: Receive) -> Response:
        """Return the reply, or an engine's own error. Every failed call is recorded.

        Raises:
            GatewayError: The gateway refused the call, or the engine gave no usable reply.
        """
        services = self._services
        attempt = services.failed.attempt(PROTOCOL, headers, None, None)
        try:
            attempt.caller = caller = services.authenticator.authenticate(headers, "agent")
            with services.limits.call(caller.key) as counted:
                async with held_body(receive, services) as body:
                    client = DisconnectWatcher(receive)
                    try:
                        async with client:
                            return await self._generate(
                                caller, attempt, read_as(Generate, body), counted
                            )
                    finally:
                        client.stop()
        except ClientGone:
            # nobody reads it; the disconnect has stopped the engine
            return Response(status_code=499)
        except GatewayError as error:
            services.failed.record(attempt, failure_of(error))
            raise

    async def _generate(
        self, caller: Principal, attempt: Attempt, said: Generate, counted: Counted
    ) -> Response:
        asked, headers = COMPLETIONS.parse_request(self._completion(said)), attempt.headers
        attempt.model = asked.model

        def asking(spec: EngineSpec | None) -> None:
            attempt.engine = spec.name if spec is not None else None

        self._services.in_flight.begin()
        held = self._services.in_flight.replies.reserve()
        try:
            async with self._services.upstream.call(
                "POST", COMPLETIONS.path, lambda spec: COMPLETIONS.engine_body(asked, spec.kind),
                {k: v for k, v in headers.items() if k in FORWARDED}
                | {"content-type": "application/json"}, key=_prefix_key(said.prompt_ids),
                run_id=(run := self._services.trajectories.run_of(caller, headers)),
                model=asked.model, on_engine=asking,
            ) as response:  # fmt: skip
                body = await response.read(held)
                if response.status >= 400:
                    told = {n.decode(): v.decode("latin-1") for n, v in returned(response.headers)}
                    self._services.failed.record(attempt, engine_failure(response.status, body))
                    return Response(body, response.status, told, response.header("content-type"))
                captured = CapturedTokens(NO_TOKENS[response.spec.kind])
                body = captured.split_trailer(body, response.header(engine_frames.OWN_BODY))
                answer = COMPLETIONS.parse_reply(asked, response.spec.kind, body)
        finally:
            held.release()
            self._services.in_flight.end()
        if not answer.choices:
            raise UpstreamFailed("the engine's completion has no choice")
        choice = answer.choices[0]
        finish = captured.finish(0, asked)
        tokens = choice.tokens or captured.tokens(0, asked)
        reply = sampled(tokens, finish if finish in ABORTED else choice.finish_reason, run)
        counted.tokens = len(said.prompt_ids) + len(reply["token_ids"])
        return Response(orjson.dumps(reply), media_type="application/json")

    def _completion(self, said: Generate) -> bytes:
        """Return the body of the completions call. Raises BadRequest or Unprocessable."""
        gateway = self._services.settings.gateway
        for name, value in (("image_data", said.image_data), ("video_data", said.video_data)):
            if value:
                raise Unprocessable(
                    f"{name}: token ids cannot carry it; "
                    "send images as parts of chat messages to .../v1/chat/completions",
                    name,
                )
        if gateway.max_prompt_tokens is not None:
            refuse_longer(len(said.prompt_ids), gateway.max_prompt_tokens, "prompt_ids")
        # Log-probabilities are always returned.
        asked = {k: v for k, v in said.sampling_params.items() if k != "logprobs"}
        if wrong := next(
            (name for name in asked if name in OURS and not _says_nothing(asked[name])), None
        ):
            raise Unprocessable(
                f"sampling_params.{wrong}: not for this route", f"sampling_params.{wrong}"
            )
        if asked.get("model") == "default":
            del asked["model"]
        if asked.get("max_tokens") is None:
            if gateway.default_max_tokens is None:
                raise Unprocessable(
                    "sampling_params.max_tokens: say it, or set gateway.default_max_tokens "
                    "(--response-length)",
                    "sampling_params.max_tokens",
                )
            asked["max_tokens"] = gateway.default_max_tokens
        kept = {k: v for k, v in asked.items() if k not in OURS}
        return dumps(
            {**DEFAULTS, **kept, "prompt": said.prompt_ids}, "sampling_params", Unprocessable
        )


def sampled(tokens: Tokens, finish_reason: str | None, run_id: str) -> dict[str, Any]:
    """Return the reply's body: Claw-R1's three fields, and the weights that sampled.

    policy_version is the sync index if one version of this run sampled all tokens.

    Raises:
        UpstreamFailed: The engine reported no tokens.
    """
    if tokens.ids is None or tokens.logprobs is None:
        raise UpstreamFailed(f"/generate needs an engine that tells tokens: {tokens.absent}")
    versions = {s.version for s in tokens.spans}
    version = parse_version(versions.pop()) if len(versions) == 1 else None
    return {
        "token_ids": unpack_ids(tokens.ids),
        "log_probs": unpack_logprobs(tokens.logprobs),
        "stop_reason": finish_reason,
        "policy_version": version.sync_index
        if version is not None and version.run_id == run_id
        else None,
        "versions": [{"version": s.version, "start": s.start, "end": s.end} for s in tokens.spans],
    }


def _says_nothing(value: Any) -> bool:
    """Return whether a refused parameter has no effect here: its value is none, false or one."""
    return value is None or value is False or (value == 1 and value is not True)


def _prefix_key(ids: Sequence[int]) -> str:
    return hashlib.blake2b(repr(ids[:PREFIX_IDS]).encode(), digest_size=16).hexdigest()
