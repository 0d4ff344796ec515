"""The demo's agent: a black box written with the OpenAI SDK alone.

It knows a tool and a base URL, nothing of training.

`python -m demo.agent` is a process of many such agents: JSON lines {"id", "question", "base_url",
"temperature"?, "stream"?} come in on a pipe, one line {"id", "answer", "first_call_key", "turns",
"error"?} goes out for each, in the order in which they end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import zlib
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from openai import AsyncOpenAI, DefaultAioHttpClient, OpenAIError

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "The price of a key.",
            "parameters": {
                "type": "object",
                "properties": {"key": {"type": "string"}},
                "required": ["key"],
            },
        },
    }
]
MAX_TURNS = 3
MAX_TOKENS = 24
# 0.5 s doubling up to 8 s: the SDK gives up after 40 s, longer than any part of the loop needs to
# come back.
RETRIES = 8
TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an episode ended.

    `answer` is None if the agent still called tools after its last turn.
    """

    answer: str | None
    first_call_key: str | None
    turns: int


@dataclass(frozen=True, slots=True)
class _Call:
    id: str
    name: str
    arguments: str


def lookup(arguments: str) -> str:
    """Run the tool on the model's arguments; return the price of the key, or "error"."""
    try:
        key = json.loads(arguments)["key"]
    except (ValueError, KeyError, TypeError):
        return "error"
    known = isinstance(key, str) and len(key) == 4 and key[0] == "k" and key[1:].isdecimal()
    return str(zlib.crc32(key.encode()) % 7) if known else "error"


class Agent:
    """Plays any number of episodes at once over one HTTP client: a client of its own for each would
    cost more than the episode.
    """

    def __init__(self, model: str = "policy", retries: int = RETRIES) -> None:
        self._model = model
        self._client = AsyncOpenAI(
            base_url="http://localhost/",
            api_key="none",
            max_retries=retries,
            timeout=TIMEOUT_SECONDS,
            http_client=DefaultAioHttpClient(),
        )

    async def __aenter__(self) -> Agent:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self._client.close()

    async def play(
        self, question: str, base_url: str, temperature: float | None = None, stream: bool = False
    ) -> Outcome:
        """One episode against an OpenAI-compatible base URL.

        Raises openai.OpenAIError when the SDK has given up.
        """
        client = self._client.with_options(base_url=base_url)
        messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
        request: dict[str, Any] = {"model": self._model, "tools": TOOLS, "max_tokens": MAX_TOKENS}
        if temperature is not None:
            request["temperature"] = temperature
        ask = _ask_streamed if stream else _ask
        first_key: str | None = None
        for turn in range(1, MAX_TURNS + 1):
            content, calls = await ask(client, request | {"messages": messages})
            if not calls:
                return Outcome(content, first_key, turn)
            if turn == 1:
                first_key = _key(calls[0].arguments)
            messages.append(
                {
                    "role": "assistant",
                    "content": content,
                    "tool_calls": [_as_message(c) for c in calls],
                }
            )
            messages += [
                {"role": "tool", "tool_call_id": c.id, "content": lookup(c.arguments)}
                for c in calls
            ]
        return Outcome(None, first_key, MAX_TURNS)


async def _ask(client: AsyncOpenAI, request: dict[str, Any]) -> tuple[str | None, list[_Call]]:
    message = (await client.chat.completions.create(**request)).choices[0].message
    calls = [
        _Call(c.id, c.function.name, c.function.arguments)
        for c in message.tool_calls or []
        if c.type == "function"
    ]
    return message.content, calls


async def _ask_streamed(
    client: AsyncOpenAI, request: dict[str, Any]
) -> tuple[str | None, list[_Call]]:
    content: list[str] = []
    calls: dict[int, _Call] = {}
    async with await client.chat.completions.create(**request, stream=True) as chunks:
        async for chunk in chunks:
            for choice in chunk.choices:
                content.append(choice.delta.content or "")
                for part in choice.delta.tool_calls or []:
                    had = calls.get(part.index, _Call("", "", ""))
                    function = part.function
                    calls[part.index] = _Call(
                        had.id or part.id or "",
                        had.name + ((function and function.name) or ""),
                        had.arguments + ((function and function.arguments) or ""),
                    )
    return "".join(content) or None, [calls[i] for i in sorted(calls)]


def _as_message(call: _Call) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _key(arguments: str) -> str | None:
    try:
        key = json.loads(arguments)["key"]
    except (ValueError, KeyError, TypeError):
        return None
    return key if isinstance(key, str) else None


async def serve_lines(concurrency: int, model: str) -> None:
    """Play the jobs of standard input, at most `concurrency` at once, until it closes and all have
    ended.
    """
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    free = asyncio.Semaphore(concurrency)

    async def one(agent: Agent, job: dict[str, Any]) -> None:
        result: dict[str, Any] = {"id": job["id"]}
        try:
            outcome = await agent.play(
                job["question"],
                job["base_url"],
                temperature=job.get("temperature"),
                stream=job.get("stream", False),
            )
            result |= asdict(outcome)
        except OpenAIError as error:
            result |= {
                "answer": None,
                "first_call_key": None,
                "turns": 0,
                "error": f"{type(error).__name__}: {error}",
            }
        finally:
            free.release()
        print(json.dumps(result), flush=True)

    async with Agent(model) as agent, asyncio.TaskGroup() as episodes:
        while line := await lines.readline():
            await free.acquire()
            episodes.create_task(one(agent, json.loads(line)))


def main() -> None:
    """Command line of the agent process."""
    parser = argparse.ArgumentParser(
        prog="python -m demo.agent", description="Many black-box agents in one process."
    )
    parser.add_argument("--concurrency", type=int, default=128, help="episodes at once")
    parser.add_argument("--model", default="policy", help="model name to ask for")
    options = parser.parse_args()
    asyncio.run(serve_lines(options.concurrency, options.model))


if __name__ == "__main__":
    main()
