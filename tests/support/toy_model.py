"""A model whose replies come from a function, over any protocol.

It has its own chat template and tokenizer.

    model = ToyModel(lambda heard: Reply("Hello") if heard.last.role == "user" else Reply("Bye"))
    engine = ScriptedEngine(model)

The template renders the same parts as real templates: tools, roles, texts, names and arguments of
calls, results. Like them, it omits the ids of calls, `cache_control`, and whether a content is a
string or a list. So prompts extend each other exactly where they would on a real model.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson
from support.scripted.script import Json, Script, ScriptedChoice

PIECES = re.compile(r"\s*\w+|\s*[^\w\s]|\s+$")
ROLES = ("begin", "tools", "system", "user", "assistant", "tool", "call", "end")
"""Token ids 1 to 8; the ids of words are higher.

Every prompt begins alike, as with real templates.
"""
LOGPROB = -0.5


class Call(NamedTuple):
    """A tool call. namespace: set for the tools of codex that have one."""

    name: str
    arguments: Mapping[str, Any]
    namespace: str | None = None

    def text(self) -> str:
        return f"{self.name} {orjson.dumps(self.arguments, option=orjson.OPT_SORT_KEYS).decode()}"


class Reply(NamedTuple):
    """A reply of the model."""

    text: str = ""
    calls: tuple[Call, ...] = ()


class Turn(NamedTuple):
    """A turn of a conversation as the template sees it.

    texts: of an assistant, its text parts. calls: the tool calls after the texts.
    """

    role: str
    texts: tuple[str, ...] = ()
    calls: tuple[Call, ...] = ()

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


@dataclass(frozen=True)
class Heard:
    """A request of any protocol. tools: their names, `namespace.name` for those in a namespace."""

    said: Json
    tools: tuple[str, ...]
    turns: tuple[Turn, ...]

    @property
    def system(self) -> str:
        """The whole system prompt."""
        return "\n".join(t.text for t in self.turns if t.role == "system")

    @property
    def last(self) -> Turn:
        """The last turn that is not a system prompt."""
        return [t for t in self.turns if t.role != "system"][-1]

    @property
    def users(self) -> list[str]:
        """The texts of the user, oldest first."""
        return [t.text for t in self.turns if t.role == "user"]

    @property
    def results(self) -> list[str]:
        """The results of tools, oldest first."""
        return [t.text for t in self.turns if t.role == "tool"]

    def called(self, name: str) -> int:
        """Return how often the model has called a tool."""
        return sum(c.name == name for t in self.turns for c in t.calls)


def heard(said: Json) -> Heard:
    """Parse a request."""
    if "input" in said:
        turns = _responses(said)
    elif "system" in said or any("input_schema" in t for t in said.get("tools") or ()):
        turns = _anthropic(said)
    else:
        turns = _chat(said)
    return Heard(said, tuple(_tool_names(said.get("tools") or ())), tuple(_merged(turns)))


def _tool_names(tools: Any) -> Iterator[str]:
    for tool in tools:
        if tool.get("type") == "namespace":
            yield from (f"{tool['name']}.{inner['name']}" for inner in tool["tools"])
        else:
            yield str((tool.get("function") or tool).get("name") or tool["type"])


def _texts(content: Any) -> tuple[str, ...]:
    """Return the texts of a content. The text of an image is its type name."""
    if isinstance(content, str):
        return (content,) if content else ()
    return tuple(b["text"] if "text" in b else f"<{b['type']}>" for b in content or ())


def _chat(said: Json) -> Iterator[Turn]:
    for message in said["messages"]:
        calls = tuple(
            Call(c["function"]["name"], orjson.loads(c["function"]["arguments"]))
            for c in message.get("tool_calls") or ()
        )
        yield Turn(
            "system" if message["role"] == "developer" else message["role"],
            _texts(message.get("content")),
            calls,
        )


def _anthropic(said: Json) -> Iterator[Turn]:
    if said.get("system"):
        yield Turn("system", _texts(said["system"]))
    for message in said["messages"]:
        content = message["content"]
        blocks: list[Json] = (
            [{"type": "text", "text": content}] if isinstance(content, str) else content
        )
        for block in blocks:
            match block["type"]:
                case "tool_use":
                    yield Turn("assistant", (), (Call(block["name"], block["input"]),))
                case "tool_result":
                    yield Turn("tool", _texts(block.get("content")))
                case "thinking" | "redacted_thinking":
                    pass
                case _:
                    yield Turn(message["role"], _texts([block]))


def _responses(said: Json) -> Iterator[Turn]:
    if said.get("instructions"):
        yield Turn("system", (said["instructions"],))
    given: list[Json] = (
        [{"role": "user", "content": said["input"]}]
        if isinstance(said["input"], str)
        else said["input"]
    )
    for item in given:
        match item.get("type", "message"):
            case "message":
                role = "system" if item["role"] == "developer" else item["role"]
                yield Turn(role, _texts(item["content"]))
            case "function_call":
                called = Call(item["name"], orjson.loads(item["arguments"]), item.get("namespace"))
                yield Turn("assistant", (), (called,))
            case "function_call_output":
                yield Turn("tool", _texts(item["output"]))
            case "reasoning":
                pass
            case other:
                yield Turn("user", (f"<{other}>", orjson.dumps(item).decode()))


def _merged(turns: Iterator[Turn]) -> Iterator[Turn]:
    """Merge consecutive assistant messages into one turn, because some agents split a reply."""
    held: Turn | None = None
    for turn in turns:
        if held is not None and turn.role == "assistant":
            held = Turn("assistant", held.texts + turn.texts, held.calls + turn.calls)
            continue
        if held is not None:
            yield held
        held = turn if turn.role == "assistant" else None
        if held is None:
            yield turn
    if held is not None:
        yield held


def pieces_of(text: str) -> list[str]:
    """Return the words of a text, each with its preceding space.

    A text begins and ends without a space.
    """
    return PIECES.findall(text.strip())


def ids_of(text: str) -> list[int]:
    """Return the token ids of a text."""
    return [100 + zlib.crc32(p.encode()) % 150_000 for p in pieces_of(text)]


def _mark(name: str) -> int:
    return 1 + ROLES.index(name)


def _spoken(texts: tuple[str, ...], calls: tuple[Call, ...]) -> list[int]:
    ids = [i for text in texts for i in ids_of(text)]
    for call in calls:
        ids += [_mark("call"), *ids_of(call.text())]
    return [*ids, _mark("end")]


def prompt_ids(request: Heard) -> list[int]:
    """Return the prompt that the template makes."""
    ids = [_mark("begin")]
    if tools := request.said.get("tools"):
        ids += [_mark("tools"), *ids_of(orjson.dumps(tools, option=orjson.OPT_SORT_KEYS).decode())]
    for turn in request.turns:
        ids += [_mark(turn.role), *_spoken(turn.texts, turn.calls)]
    return [*ids, _mark("assistant")]


def say_of(reply: Reply, number: int) -> ScriptedChoice:
    """Return the sampled choice for a reply. number: of the request, for unique call ids."""
    ids = _spoken((reply.text,) if reply.text else (), reply.calls)
    texts: list[str | None] = list(pieces_of(reply.text))
    calls: list[Json] = [
        {
            "id": f"call_{number:08x}{at:02x}",
            "type": "function",
            "function": {"name": c.name, "arguments": orjson.dumps(c.arguments).decode()},
            **({"namespace": c.namespace} if c.namespace else {}),
        }
        for at, c in enumerate(reply.calls)
    ]
    texts += [None] * (len(ids) - len(texts))
    return ScriptedChoice(
        ids, texts, [LOGPROB] * len(ids), calls, "tool_calls" if calls else "stop"
    )


@dataclass
class ToyModel:
    """A script for `ScriptedEngine`.

    decide: returns the reply to a request. version: the reported weight version. heard, said: all
    requests and replies.
    """

    decide: Callable[[Heard], Reply]
    version: str = "default/0.0"
    heard: list[Heard] = field(default_factory=list)
    said: list[Script] = field(default_factory=list)

    def __call__(self, request: Json) -> Script:
        asked = heard(request)
        say = say_of(self.decide(asked), len(self.heard))
        span = {"version": self.version, "start": 0, "end": len(say.ids)}
        script = Script([say], prompt_ids(asked), [[span]], self.version, number=len(self.heard))
        self.heard.append(asked)
        self.said.append(script)
        return script
