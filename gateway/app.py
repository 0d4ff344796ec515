"""Builds the gateway's web application (`create_app`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import RedirectResponse

from clawstream.gateway import errors
from clawstream.gateway.api.bodies import in_openapi
from clawstream.gateway.api.curations import curation_routes
from clawstream.gateway.api.dependencies import principal_with
from clawstream.gateway.api.openapi import with_model_calls
from clawstream.gateway.api.rewards import reward_routes
from clawstream.gateway.api.rollout_budget.budget import BudgetSource
from clawstream.gateway.api.rollout_budget.routes import rollout_budget_routes
from clawstream.gateway.api.sessions import session_routes
from clawstream.gateway.asgi.client_disconnect import Receive
from clawstream.gateway.asgi.connection_limit import max_calls, max_connections
from clawstream.gateway.asgi.error_replies import OPENAI_ERRORS, ErrorFormat, reply_of
from clawstream.gateway.asgi.in_flight_limits import InFlightLimits
from clawstream.gateway.asgi.messages import App, Scope, Send
from clawstream.gateway.asgi.request_encoding import RequestDecoder
from clawstream.gateway.asgi.unhandled_errors import UNFORESEEN, UnhandledErrors
from clawstream.gateway.attribution.resolver import TrajectoryResolver
from clawstream.gateway.auth.authenticator import Authenticator, Principal
from clawstream.gateway.auth.key_limits import KeyLimits
from clawstream.gateway.auth.session_keys import secret_of
from clawstream.gateway.claw_r1.api import claw_r1_routes
from clawstream.gateway.claw_r1.generator import Generate, GenerateEndpoint
from clawstream.gateway.clock import Clock
from clawstream.gateway.continuation.memory import ContinuationMemory
from clawstream.gateway.durability.blobs import Blobs
from clawstream.gateway.durability.delivery import DeliveryManager
from clawstream.gateway.durability.log import LogProducer, Message
from clawstream.gateway.durability.record_writer import RecordWriter
from clawstream.gateway.durability.spool import Spool
from clawstream.gateway.engines.pool import EnginePool
from clawstream.gateway.engines.registry import EngineRegistry
from clawstream.gateway.metrics import Metrics
from clawstream.gateway.protocols.adapter import ProtocolAdapter
from clawstream.gateway.protocols.anthropic_messages import ANTHROPIC_ERRORS, AnthropicMessages
from clawstream.gateway.protocols.openai_chat import OpenAIChat, OpenAIChatBatch
from clawstream.gateway.protocols.openai_completions import OpenAICompletions
from clawstream.gateway.protocols.openai_responses import OpenAIResponses
from clawstream.gateway.proxy.call import CallEndpoint
from clawstream.gateway.proxy.call_router import Endpoint, ModelCalls
from clawstream.gateway.proxy.failed_calls import FailedCalls
from clawstream.gateway.proxy.forwarding import PassedHeaders
from clawstream.gateway.proxy.passthrough import PassthroughEndpoint
from clawstream.gateway.proxy.paths import how_to_call
from clawstream.gateway.proxy.services import Services
from clawstream.gateway.redaction.redactor import redaction_of
from clawstream.runtime.blob_store import BlobStore
from clawstream.runtime.logs import logger
from clawstream.runtime.process import open_files
from clawstream.runtime.process.metrics import add_process_metrics
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.settings import Settings

ADAPTERS: tuple[ProtocolAdapter, ...] = (
    OpenAIChat(),
    OpenAIChatBatch(),
    OpenAICompletions(),
    OpenAIResponses(),
    AnthropicMessages(),
)
"""Adapters of all sampling protocols."""
PASSTHROUGH: tuple[tuple[str, str, ErrorFormat], ...] = (
    ("GET", "/v1/models", OPENAI_ERRORS),
    ("GET", "/v1/models/", OPENAI_ERRORS),
    ("POST", "/v1/responses/compact", OPENAI_ERRORS),
    ("POST", "/v1/responses/input_tokens", OPENAI_ERRORS),
    ("POST", "/tokenize", OPENAI_ERRORS),
    ("POST", "/detokenize", OPENAI_ERRORS),
    ("POST", "/v1/embeddings", OPENAI_ERRORS),
    ("POST", "/v1/moderations", OPENAI_ERRORS),
    ("POST", "/v1/rerank", OPENAI_ERRORS),
    ("POST", "/v1/messages/count_tokens", ANTHROPIC_ERRORS),
)
"""Forwarded requests that sample nothing to train. A path that ends with a slash takes an id."""


def create_app(
    settings: Settings,
    producer: LogProducer,
    registry: EngineRegistry,
    codec: Codec | None = None,
    clock: Clock | None = None,
    budgets: BudgetSource | None = None,
) -> GatewayApp:
    """Build the gateway over a producer and an engine registry.

    The caller starts and stops both; the application owns the spool and the connections. While the
    application runs, `GatewayApp.dead_letter` records a dead letter.
    """
    clock, metrics = clock or Clock(), Metrics()
    add_process_metrics(metrics.registry, settings)
    directory = settings.spool_dir / settings.gateway.gateway_id
    codec = codec or Codec()
    delivery = DeliveryManager(
        producer,
        Spool(directory, settings.gateway.spool_max_bytes),
        metrics,
        settings.gateway.acks,
        Blobs(
            BlobStore(settings.blob_uri, settings.gateway.blob_options),
            codec,
            settings.gateway.produce_timeout_s,
        ),
        max_behind=settings.lake.dedupe_window // 2,
        max_age_s=settings.spool_max_age_s,
    )
    engines = EnginePool(settings.gateway, registry, lambda: producer.uptime_s, clock, metrics)
    authenticator = Authenticator(settings, metrics)
    trajectories = TrajectoryResolver(settings.run_id)
    redaction = redaction_of(settings, secret_of(settings), metrics.redaction_failed.inc)
    log = RecordWriter(settings.kafka.topics, codec, delivery, redaction)
    files, max_in_flight = open_files.limit(), settings.gateway.max_in_flight
    in_flight = InFlightLimits(
        settings.gateway.max_in_flight_bytes,
        max_calls(files, max_in_flight),
        settings.gateway.max_in_flight_reply_bytes,
    )
    failed = FailedCalls(
        settings.kafka.topics.steps,
        settings.gateway.gateway_id,
        codec,
        producer,
        trajectories,
        redaction,
        clock,
        metrics,
    )
    limits = KeyLimits(clock)
    services = Services(
        settings, authenticator, trajectories, delivery, log, engines, clock, metrics, in_flight,
        failed, limits, ContinuationMemory(settings.gateway.continuation_memory_bytes),
        PassedHeaders.of(settings.gateway), settings.traces.gives_own_traces,
    )  # fmt: skip

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await delivery.start()
        await engines.open()
        async with authenticator.watching():
            yield
        # The server cancels calls that take too long to finish; they record what they have sent.
        await in_flight.ended()
        await engines.close()
        await delivery.close()

    async def dead_letter(message: Message) -> None:
        try:
            await delivery.record([message])
        except errors.NotRecorded as error:
            logger().error("dead_letter_lost", error=str(error))

    # The documentation pages of FastAPI load scripts from the internet.
    app = GatewayApp(
        title="Clawstream gateway",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.dead_letter = dead_letter
    app.client_timeout_s = settings.gateway.client_timeout_s
    app.max_connections = max_connections(files, max_in_flight)
    app.include_router(session_routes(services))
    app.include_router(reward_routes(services))
    app.include_router(curation_routes(services))
    app.include_router(
        rollout_budget_routes(
            services,
            budgets,
            lambda run: registry.oldest_loaded(run, producer.uptime_s),
            settings.admit.val_every,
            lambda run: settings.trainer.max_versions if run == settings.run_id else None,
        )
    )
    app.include_router(claw_r1_routes(services))
    _operations(app, services, producer)
    _install_error_handlers(app, settings.gateway.base_path)
    calls: dict[tuple[str, str], Endpoint] = {
        ("POST", adapter.path.removeprefix("/v1")): CallEndpoint(services, adapter)
        for adapter in ADAPTERS
    } | {
        (method, path.removeprefix("/v1")): PassthroughEndpoint(services, method, path, errors)
        for method, path, errors in PASSTHROUGH
    }
    routes = calls | {("POST", "/generate"): GenerateEndpoint(services)}
    metrics.count_in_flight(lambda: services.in_flight.calls)
    # The stack, from the innermost layer: the web framework, model calls, errors, pages' origins.
    decoder = RequestDecoder(settings.gateway.max_body_bytes, in_flight)
    app.stack = ModelCalls(app.framework, routes, decoder, settings.gateway.base_path)
    app.stack = UnhandledErrors(app.stack)
    if origins := settings.gateway.cors_origins:
        app.stack = CORSMiddleware(
            app.stack,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],
            max_age=600,
        )
    _describe(app, calls)
    return app


class GatewayApp(FastAPI):
    """The gateway's web application. Model calls never enter the web framework.

    Attributes:
        stack: The application with its middleware, see `create_app`.
        dead_letter: Records a dead letter while the application runs.
        client_timeout_s: gateway.client_timeout_s.
        max_connections: Limit of the server's connections.
    """

    stack: App
    dead_letter: Callable[[Message], Coroutine[Any, Any, None]]
    client_timeout_s: float
    max_connections: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.stack(scope, receive, send)

    async def framework(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request by the routes of the framework."""
        await super().__call__(scope, receive, send)


def _describe(app: FastAPI, calls: Iterable[tuple[str, str]]) -> None:
    """Add the model calls to /openapi.json."""
    generate = app.openapi

    def with_calls() -> dict[str, Any]:
        if app.openapi_schema is None:
            page = with_model_calls(generate(), calls)
            page["paths"]["/generate"] = {
                "post": {"summary": "Tokens in, tokens out", **in_openapi(Generate)}
            }
            app.openapi_schema = page
        return app.openapi_schema

    app.openapi = with_calls  # type: ignore[method-assign]


def _operations(app: FastAPI, services: Services, producer: LogProducer) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/")
    @app.get("/api/hello")
    async def greeting() -> Response:
        return Response()  # Claude Code opens its connection with one of these paths

    agent = principal_with(services, "agent")

    @app.get("/docs", include_in_schema=False)
    async def docs(_: Principal = agent) -> Response:
        return RedirectResponse(f"{services.settings.gateway.base_path}/openapi.json")

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi(_: Principal = agent) -> dict[str, Any]:
        return app.openapi()

    @app.get("/ready")
    async def ready(response: Response) -> dict[str, bool]:
        state = {"kafka": producer.reachable, "worker": bool(services.engines.ready)}
        response.status_code = 200 if all(state.values()) else 503
        return state

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(
            services.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )


def _install_error_handlers(app: FastAPI, base_path: str) -> None:
    """Reply to every error in OpenAI's format."""

    def reply(error: errors.GatewayError) -> Response:
        status, headers, body = reply_of(error)
        return Response(body, status, {k.decode(): v.decode() for k, v in headers})

    @app.exception_handler(Exception)
    async def unforeseen(_: Request, error: Exception) -> Response:
        return reply(UNFORESEEN)  # the framework raises the error again; `UnhandledErrors` logs it

    @app.exception_handler(errors.GatewayError)
    async def ours(_: Request, error: errors.GatewayError) -> Response:
        return reply(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        return reply(errors.Unprocessable(f"{field}: {first['msg']}", field))

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        called = f"{request.method} {request.url.path}"
        if error.status_code == 405:
            return reply(errors.WrongMethod(f"{called}: {error.detail}"))
        if error.status_code == 404:
            return reply(errors.NotFound(f"{called}: no such path. {how_to_call(base_path)}"))
        return reply(errors.BadRequest(str(error.detail)))
