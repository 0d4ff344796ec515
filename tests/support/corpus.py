"""Replies of other providers, and their official clients' readings.

The replies are written by hand from the providers' documentation, and from reports of what
providers and proxies really sent (`reports`).

`corpus/manifest.json` names each file and its protocol. `recorded` holds the messages of its steps
where the client cannot produce them: it raises an error, drops a part, or has no accumulator.
`finish` is the steps' finish reason in the terms of the record; null: the reply broke off. `status`
is their status where `finish` does not tell it. `usage` lists prompt, cached, completion and
reasoning tokens. `failed` is the failed call of a reply without a step: source, status and the
begin of the message.
"""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState

CORPUS = Path(__file__).parents[1] / "corpus"
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}


@dataclass(frozen=True)
class Case:
    """One recorded reply. name: its file."""

    name: str
    protocol: str
    finish: str | None
    recorded: list[Any] | None = None
    status: str | None = None
    usage: list[int | None] | None = None
    failed: list[Any] | None = None

    @property
    def stream(self) -> bool:
        return self.name.endswith(".sse")

    @property
    def data(self) -> bytes:
        return (CORPUS / self.name).read_bytes()

    @property
    def trajectory(self) -> str:
        return self.name.replace("/", "-")

    def request(self) -> dict[str, Any]:
        """The client's body. The replaying server selects its reply by the model in it."""
        body: dict[str, Any] = {"model": self.name}
        if self.protocol == "completions":
            return body | {"prompt": "Once"}
        if self.protocol == "responses":
            return body | {"input": "hi"}
        body["messages"] = [{"role": "user", "content": "hi"}]
        return body | {"max_tokens": 50} if self.protocol == "messages" else body


def cases() -> list[Case]:
    """Return all cases of the manifest."""
    return [
        Case(name, **said)
        for name, said in json.loads((CORPUS / "manifest.json").read_bytes()).items()
    ]


@asynccontextmanager
async def replaying(reply_of: Mapping[str, bytes]) -> AsyncIterator[str]:
    """Run a server that selects its reply by the request's model; yield its URL.

    reply_of: model to reply bytes, head included.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
            body = await reader.readexactly(length)
            model = json.loads(body)["model"] if body else None
            writer.write(
                reply_of.get(model, b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            )
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client closed the connection
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def reply(data: bytes, content_type: str, *headers: str) -> bytes:
    """Return a whole HTTP reply with status 200."""
    head = [
        "HTTP/1.1 200 OK",
        f"content-type: {content_type}",
        f"content-length: {len(data)}",
        "connection: close",
    ]
    return "\r\n".join([*head, *headers, "", ""]).encode() + data


def _dict(model: Any) -> Any:
    """Return the fields of a client's object, including values of an unexpected type."""
    return model.to_dict(warnings=False)


class Seen(NamedTuple):
    """The official client's reading of a reply: its parts in order, then the joined messages.

    error: the exception that it raised.
    """

    parts: list[Any]
    messages: list[Any] | None
    error: str | None


class Clients:
    """The official clients, created once because each one loads the machine's certificates.

    `async with` closes them.
    """

    def __init__(self) -> None:
        self._openai = AsyncOpenAI(
            base_url="http://unset", api_key="none", max_retries=0, timeout=300
        )
        self._anthropic = AsyncAnthropic(
            base_url="http://unset", api_key="none", max_retries=0, timeout=300
        )

    async def __aenter__(self) -> Clients:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._openai.close()
        await self._anthropic.close()

    async def seen(self, case: Case, base_url: str) -> Seen:
        """Ask with the protocol's client. base_url: without /v1."""
        parts: list[Any] = []
        try:
            if case.protocol == "messages":
                anthropic = self._anthropic.with_options(base_url=base_url)
                return Seen(parts, await _messages(anthropic, case, parts), None)
            openai = self._openai.with_options(base_url=base_url + "/v1")
            ask = {"chat": _chat, "completions": _completions, "responses": _responses}[
                case.protocol
            ]
            return Seen(parts, await ask(openai, case, parts), None)
        except Exception as error:  # noqa: BLE001 - any error must be the same through the gateway
            return Seen(parts, None, f"{type(error).__name__}: {error}")


async def _chat(client: AsyncOpenAI, case: Case, parts: list[Any]) -> list[Any]:
    if not case.stream:
        whole = await client.chat.completions.create(**case.request())
        parts.append(_dict(whole))
        return [_dict(choice.message) for choice in whole.choices]
    chunks = [
        chunk async for chunk in await client.chat.completions.create(**case.request(), stream=True)
    ]
    parts += [_dict(chunk) for chunk in chunks]
    state = ChatCompletionStreamState()
    with warnings.catch_warnings():
        # pydantic warns about values of an unexpected type.
        warnings.simplefilter("ignore", UserWarning)
        for chunk in chunks:
            if chunk.object == "chat.completion.chunk":  # as `client.chat.completions.stream` does
                state.handle_chunk(chunk)
    return [
        _as_plain(_dict(choice.message)) for choice in state.current_completion_snapshot.choices
    ]


def _as_plain(message: dict[str, Any]) -> dict[str, Any]:
    """Convert a streamed message to the form of a plain reply.

    openai-python concatenates repeated roles and keeps the index in each call.
    """
    calls = [
        {name: value for name, value in call.items() if name != "index"}
        for call in message.get("tool_calls") or ()
    ]
    return message | {"role": "assistant"} | ({"tool_calls": calls} if calls else {})


async def _completions(client: AsyncOpenAI, case: Case, parts: list[Any]) -> list[Any]:
    if not case.stream:
        whole = await client.completions.create(**case.request())
        parts.append(_dict(whole))
        return [{"text": choice.text} for choice in whole.choices]
    text = ""
    async for chunk in await client.completions.create(**case.request(), stream=True):
        parts.append(_dict(chunk))
        text += "".join(choice.text or "" for choice in chunk.choices)
    return [{"text": text}]


async def _responses(client: AsyncOpenAI, case: Case, parts: list[Any]) -> list[Any]:
    if not case.stream:
        whole = await client.responses.create(**case.request())
        parts.append(_dict(whole))
        return [{"output": _dict(whole)["output"]}]
    async with client.responses.stream(**case.request()) as events:
        async for event in events:
            parts.append(_dict(event))
        final = await events.get_final_response()
    return [{"output": _dict(final)["output"]}]


async def _messages(client: AsyncAnthropic, case: Case, parts: list[Any]) -> list[Any]:
    if not case.stream:
        whole = await client.messages.create(**case.request())
        parts.append(_dict(whole))
        return [{"role": whole.role, "content": _dict(whole)["content"]}]
    async with client.messages.stream(**case.request()) as events:
        async for event in events:
            parts.append(_dict(event))
        final = await events.get_final_message()
    return [{"role": final.role, "content": _dict(final)["content"]}]
