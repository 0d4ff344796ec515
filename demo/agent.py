"""The demo's agent: a black box written with the OpenAI SDK.

It has a tool and a base URL, and no part in training.

`python -m clawstream.demo.agent` is a process of many such agents. It reads JSON lines {"id",
"question", "base_url", "temperature"?, "stream"?} from standard input and writes one line {"id",
"answer", "turns", "error"?} for each, in the order in which the episodes end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

from openai import AsyncOpenAI, DefaultAioHttpClient, OpenAIError

from clawstream.demo.task import TOOLS, is_key, key_of, price

MAX_TURNS = 3
MAX_TOKENS = 24
# 0.5 s doubling up to 8 s: the SDK stops after 40 s, longer than a restart of any process takes.
RETRIES = 8
TIMEOUT_SECONDS = 120.0


Json = dict[str, Any]


def lookup(arguments: str) -> str:
    """Run the tool on the model's arguments; return the price of the key, or "error"."""
    key = key_of(arguments)
    return str(price(key)) if key is not None and is_key(key) else "error"


async def play(client: AsyncOpenAI, model: str, job: Json) -> Json:
    """Play one episode against an OpenAI-compatible base URL.

    Returns:
        {"answer", "turns"}. answer: None if the agent still called tools in its last turn.

    Raises:
        openai.OpenAIError: the SDK has stopped retrying.
    """
    client = client.with_options(base_url=job["base_url"])
    messages: list[Json] = [{"role": "user", "content": job["question"]}]
    request: Json = {"model": model, "tools": TOOLS, "max_tokens": MAX_TOKENS}
    if "temperature" in job:
        request["temperature"] = job["temperature"]
    ask = _ask_streamed if job.get("stream") else _ask
    for turn in range(1, MAX_TURNS + 1):
        content, calls = await ask(client, request | {"messages": messages})
        if not calls:
            return {"answer": content, "turns": turn}
        messages.append({"role": "assistant", "content": content, "tool_calls": calls})
        messages += [
            {"role": "tool", "tool_call_id": c["id"], "content": lookup(c["function"]["arguments"])}
            for c in calls
        ]
    return {"answer": None, "turns": MAX_TURNS}


async def _ask(client: AsyncOpenAI, request: Json) -> tuple[str | None, list[Json]]:
    """Return content and tool calls of a reply."""
    message = (await client.chat.completions.create(**request)).choices[0].message
    calls = [
        _call(c.id, c.function.name, c.function.arguments)
        for c in message.tool_calls or []
        if c.type == "function"
    ]
    return message.content, calls


async def _ask_streamed(client: AsyncOpenAI, request: Json) -> tuple[str | None, list[Json]]:
    content: list[str] = []
    calls: dict[int, Json] = {}
    async with await client.chat.completions.create(**request, stream=True) as chunks:
        async for chunk in chunks:
            for choice in chunk.choices:
                content.append(choice.delta.content or "")
                for part in choice.delta.tool_calls or []:
                    call = calls.setdefault(part.index, _call("", "", ""))
                    call["id"] = call["id"] or part.id or ""
                    if part.function is not None:
                        call["function"]["name"] += part.function.name or ""
                        call["function"]["arguments"] += part.function.arguments or ""
    return "".join(content) or None, [calls[i] for i in sorted(calls)]


def _call(call_id: str, name: str, arguments: str) -> Json:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


async def serve_lines(concurrency: int, model: str) -> None:
    """Play the jobs of standard input, at most `concurrency` at once, until all have ended."""
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    free = asyncio.Semaphore(concurrency)

    # One client for all episodes, because a client costs more than an episode.
    client = AsyncOpenAI(
        base_url="http://localhost/",
        api_key="none",
        max_retries=RETRIES,
        timeout=TIMEOUT_SECONDS,
        http_client=DefaultAioHttpClient(),
    )

    async def run(job: Json) -> None:
        try:
            result = await play(client, model, job)
        except OpenAIError as error:
            result = {"answer": None, "turns": 0, "error": f"{type(error).__name__}: {error}"}
        finally:
            free.release()
        print(json.dumps({"id": job["id"], **result}), flush=True)

    async with client, asyncio.TaskGroup() as episodes:
        while line := await lines.readline():
            await free.acquire()
            episodes.create_task(run(json.loads(line)))


def main() -> None:
    """Command line of the agent process."""
    parser = argparse.ArgumentParser(
        prog="python -m clawstream.demo.agent", description="Many black-box agents in one process."
    )
    parser.add_argument("--concurrency", type=int, default=128, help="episodes at once")
    parser.add_argument("--model", default="policy", help="model name to ask for")
    options = parser.parse_args()
    asyncio.run(serve_lines(options.concurrency, options.model))


if __name__ == "__main__":
    main()
