"""Serve POST /generate: tokens in, tokens out, by one completions call.

It records nothing: the agent submits its steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from clawstream.gateway.api.bodies import read_as
from clawstream.gateway.asgi.client_disconnect import Receive
from clawstream.gateway.asgi.error_replies import OPENAI_ERRORS, Reply, json_reply
from clawstream.gateway.asgi.messages import Scope, Send, send_reply
from clawstream.gateway.capture.engine_tokens import NO_TOKENS, CapturedTokens
from clawstream.gateway.capture.steps import ABORTED
from clawstream.gateway.claw_r1.bodies import TokenIds
from clawstream.gateway.engines.client import EngineCall
from clawstream.gateway.engines.registry import EngineSpec
from clawstream.gateway.errors import NotFound, Unprocessable, UpstreamFailed
from clawstream.gateway.protocols.base import Tokens
from clawstream.gateway.protocols.openai_completions import OpenAICompletions
from clawstream.gateway.protocols.request_fields import dumps
from clawstream.gateway.proxy.client_call import ClientCall
from clawstream.gateway.proxy.failed_calls import Failure, engine_failure
from clawstream.gateway.proxy.forwarding import content_headers, forwarded
from clawstream.gateway.proxy.paths import CallTarget
from clawstream.gateway.proxy.services import Services
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


class GenerateEndpoint:
    """Serve POST /generate."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def serve(self, scope: Scope, receive: Receive, send: Send, target: CallTarget) -> None:
        """Serve one call."""
        await GenerateCall(
            self._services, PROTOCOL, OPENAI_ERRORS, scope, receive, send, target
        ).serve()


class GenerateCall(ClientCall):
    """One call of POST /generate. It makes no step; every failure is recorded."""

    def failed(self, failure: Failure) -> None:
        """Record the failure."""
        self.services.failed.record(self, failure)

    async def handle(self, body: bytes) -> str:
        """Send the reply, or an engine's own error."""
        if self.path_trajectory is not None:
            raise NotFound("no such path: /generate names no trajectory")
        failure = None
        async with self.client:
            reply, failure = await self._reply(read_as(Generate, body))
        await send_reply(self.send, reply)
        if failure is not None:
            self.failed(failure)
        return "answered" if failure is None else "upstream_error"

    async def _reply(self, payload: Generate) -> tuple[Reply, Failure | None]:
        """Return the reply, and the failure if it is an engine's own error."""
        services, headers = self.services, self.headers
        request = COMPLETIONS.parse_request(self._completion(payload))
        self.model = request.model
        run = services.trajectories.run_of(self.caller, headers)
        async with EngineCall(
            services.engines, "POST", COMPLETIONS.path,
            lambda spec: COMPLETIONS.engine_body(request, spec.kind),
            forwarded(headers, True, services.passed),
            key=_prefix_key(payload.prompt_ids), run_id=run, model=request.model,
            on_engine=self._on_engine,
        ) as reply:  # fmt: skip
            body = await reply.read(self.reply_room)
            if reply.status >= 400:
                sent = content_headers(reply, services.passed)
                sent.append((b"content-length", b"%d" % len(body)))
                return Reply(reply.status, sent, body), engine_failure(reply.status, body)
            captured = CapturedTokens(NO_TOKENS[reply.spec.kind])
            body = captured.split_trailer(body, reply.header(engine_frames.OWN_BODY))
            parsed = COMPLETIONS.parse_reply(request, reply.spec.kind, body)
        if not parsed.choices:
            raise UpstreamFailed("the engine's completion has no choice")
        choice = parsed.choices[0]
        finish = captured.finish(0, request)
        tokens = choice.tokens or captured.tokens(0, request)
        fields = reply_of(tokens, finish if finish in ABORTED else choice.finish_reason, run)
        self.tokens = len(payload.prompt_ids) + len(fields["token_ids"])
        return json_reply(fields), None

    def _on_engine(self, spec: EngineSpec | None) -> None:
        self.engine = spec.name if spec is not None else None

    def _completion(self, payload: Generate) -> bytes:
        """Return the body of the completions call. Raises BadRequest or Unprocessable."""
        gateway = self.services.settings.gateway
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
