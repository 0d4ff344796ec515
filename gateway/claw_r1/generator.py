"""Serve POST /generate: tokens in, tokens out, by one completions call.

It records nothing: the agent submits its steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import orjson
from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict, Field

from clawstream.gateway.api.bodies import read_as
from clawstream.gateway.asgi.client_disconnect import DisconnectWatcher
from clawstream.gateway.asgi.messages import header_map
from clawstream.gateway.auth.authenticator import Principal
from clawstream.gateway.capture.engine_tokens import NO_TOKENS, CapturedTokens
from clawstream.gateway.capture.steps import ABORTED, Call
from clawstream.gateway.claw_r1.bodies import TokenIds
from clawstream.gateway.engines.client import EngineCall
from clawstream.gateway.engines.registry import EngineSpec
from clawstream.gateway.errors import ClientGone, GatewayError, Unprocessable, UpstreamFailed
from clawstream.gateway.protocols.base import Tokens
from clawstream.gateway.protocols.openai_completions import OpenAICompletions
from clawstream.gateway.protocols.request_fields import dumps
from clawstream.gateway.proxy.failed_calls import engine_failure, failure_of
from clawstream.gateway.proxy.forwarding import forwarded, returned
from clawstream.gateway.proxy.services import Services, held_body
from clawstream.gateway.proxy.token_limits import refuse_longer
from clawstream.schemas import engine_frames
from clawstream.schemas.ids import parse_version
from clawstream.schemas.tokens import unpack_ids, unpack_logprobs

PREFIX_IDS = 128
"""Number of first prompt ids that select the engine.

Calls with equal ids go to the same engine, which has them in its cache.
"""
FIXED = frozenset(
    {"prompt", "stream", "n", "best_of", "echo", "suffix", "prompt_embeds", "use_beam_search"}
)
"""Parameters of completions that the route does not accept: it returns one whole reply."""
DEFAULTS: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
"""Claw-R1's defaults, sent explicitly because a model may have other defaults."""
COMPLETIONS = OpenAICompletions()
PROTOCOL = "claw-r1.generate"
"""Protocol name of a failed call."""


class Generate(BaseModel):
    """Body of POST /generate. sampling_params: those of vLLM's completions."""

    model_config = ConfigDict(frozen=True)

    prompt_ids: Annotated[TokenIds, Field(min_length=1)]
    sampling_params: dict[str, Any] = {}
    image_data: list[Any] | None = None
    video_data: list[Any] | None = None


class Generator:
    """Serve POST /generate."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def serve(self, request: Request) -> Response:
        """Return the reply, or an engine's own error. Every failed call is recorded.

        Raises:
            GatewayError: The gateway refused the call, or the engine gave no usable reply.
        """
        services, receive = self._services, request.receive
        headers, clock = header_map(request.scope), services.clock
        call, use = Call(PROTOCOL, headers, clock.micros(), clock.monotonic()), None
        try:
            call.caller = caller = services.admit(request.scope, headers, "agent")
            use = services.limits.begin(caller.key)
            async with held_body(receive, services) as body:
                client = DisconnectWatcher(receive)
                try:
                    async with client:
                        return await self._generate(caller, call, read_as(Generate, body))
                finally:
                    client.stop()
        except ClientGone:
            # nobody reads it; the disconnect has stopped the engine
            return Response(status_code=499)
        except GatewayError as error:
            services.failed.record(call, failure_of(error))
            raise
        finally:
            services.limits.end(use, call.tokens)

    async def _generate(self, caller: Principal, call: Call, payload: Generate) -> Response:
        services, headers = self._services, call.headers
        request = COMPLETIONS.parse_request(self._completion(payload))
        call.model = request.model

        def on_engine(spec: EngineSpec | None) -> None:
            call.engine = spec.name if spec is not None else None

        services.in_flight.begin()
        held = services.in_flight.replies.reserve()
        try:
            run = services.trajectories.run_of(caller, headers)
            async with EngineCall(
                services.engines, "POST", COMPLETIONS.path,
                lambda spec: COMPLETIONS.engine_body(request, spec.kind),
                forwarded(headers, True, services.passed),
                key=_prefix_key(payload.prompt_ids), run_id=run, model=request.model,
                on_engine=on_engine,
            ) as response:  # fmt: skip
                body = await response.read(held)
                if response.status >= 400:
                    services.failed.record(call, engine_failure(response.status, body))
                    back = {
                        n.decode(): v.decode("latin-1")
                        for n, v in returned(response.headers, services.passed)
                    }
                    return Response(body, response.status, back, response.header("content-type"))
                captured = CapturedTokens(NO_TOKENS[response.spec.kind])
                body = captured.split_trailer(body, response.header(engine_frames.OWN_BODY))
                parsed = COMPLETIONS.parse_reply(request, response.spec.kind, body)
        finally:
            held.release()
            services.in_flight.end()
        if not parsed.choices:
            raise UpstreamFailed("the engine's completion has no choice")
        choice = parsed.choices[0]
        finish = captured.finish(0, request)
        tokens = choice.tokens or captured.tokens(0, request)
        reply = reply_of(tokens, finish if finish in ABORTED else choice.finish_reason, run)
        call.tokens = len(payload.prompt_ids) + len(reply["token_ids"])
        return Response(orjson.dumps(reply), media_type="application/json")

    def _completion(self, payload: Generate) -> bytes:
        """Return the body of the completions call. Raises BadRequest or Unprocessable."""
        gateway = self._services.settings.gateway
        for name in ("image_data", "video_data"):
            if getattr(payload, name):
                raise Unprocessable(
                    f"{name}: token ids cannot carry it; "
                    "send images as parts of chat messages to .../v1/chat/completions",
                    name,
                )
        if gateway.max_prompt_tokens is not None:
            refuse_longer(len(payload.prompt_ids), gateway.max_prompt_tokens, "prompt_ids")
        params = dict(payload.sampling_params)
        params.pop("logprobs", None)  # always returned
        for name in [name for name in params if name in FIXED]:
            if not _has_no_effect(params.pop(name)):
                raise Unprocessable(
                    f"sampling_params.{name}: not for this route", f"sampling_params.{name}"
                )
        if params.get("model") == "default":
            del params["model"]
        if params.get("max_tokens") is None:
            if gateway.default_max_tokens is None:
                raise Unprocessable(
                    "sampling_params.max_tokens: say it, or set gateway.default_max_tokens "
                    "(--response-length)",
                    "sampling_params.max_tokens",
                )
            params["max_tokens"] = gateway.default_max_tokens
        return dumps(
            {**DEFAULTS, **params, "prompt": payload.prompt_ids}, "sampling_params", Unprocessable
        )


def reply_of(tokens: Tokens, finish_reason: str | None, run_id: str) -> dict[str, Any]:
    """Return the reply's body: Claw-R1's three fields, and the weights that sampled.

    policy_version is the sync index if one version of this run sampled all tokens.

    Raises:
        UpstreamFailed: The engine reported no tokens.
    """
    if tokens.ids is None or tokens.logprobs is None:
        raise UpstreamFailed(f"/generate needs an engine that tells tokens: {tokens.absent}")
    versions = {s.version for s in tokens.spans}
    version = parse_version(versions.pop()) if len(versions) == 1 else None
    if version is not None and version.run_id != run_id:
        version = None
    return {
        "token_ids": unpack_ids(tokens.ids),
        "log_probs": unpack_logprobs(tokens.logprobs),
        "stop_reason": finish_reason,
        "policy_version": None if version is None else version.sync_index,
        "versions": [{"version": s.version, "start": s.start, "end": s.end} for s in tokens.spans],
    }


def _has_no_effect(value: Any) -> bool:
    """Return whether the value of a refused parameter is none, false or one."""
    return value is None or value is False or (value == 1 and value is not True)


def _prefix_key(ids: Sequence[int]) -> str:
    return hashlib.blake2b(repr(ids[:PREFIX_IDS]).encode(), digest_size=16).hexdigest()
