"""What each step adds to its conversation, with tool results named by their calls. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Message = Mapping[str, Any]
Chat = tuple[tuple[Message, ...], tuple[Message, ...]]
"""Messages, the reply last, and tools, in the shape of Chat Completions."""
ReadChat = Callable[[str, bytes, bytes], Chat | None]
"""Reads (protocol, request, response) of a step; None: no chat."""


_DATA_URL = re.compile(r"data:image/(png|jpeg|gif|webp);base64,")
"""Images that a page shows: a browser runs no script of them. None of another host is loaded."""


class ToolCall(NamedTuple):
    """A tool call. step: the step whose reply made it."""

    call_id: str
    name: str
    arguments: str
    step: int


class Part(NamedTuple):
    """A message to show.

    images: data URLs. answers: the call that a tool's result answers. first: whether the result is
    shown first here.
    """

    role: str
    text: str
    images: tuple[str, ...]
    calls: tuple[ToolCall, ...]
    answers: ToolCall | None
    first: bool


class Turn(NamedTuple):
    """What a step adds: the messages before the reply that its parent lacks, and the reply.

    repeated: number of messages that the parent has too. raw: the bodies, if they are no chat.
    """

    repeated: int
    added: tuple[Part, ...]
    reply: Part | None
    raw: tuple[str, str] | None


def turns_of(
    steps: Iterable[Mapping[str, Any]], read: ReadChat
) -> tuple[list[Turn], list[Message]]:
    """Return the turn of each step, in order, and the definitions of all tools.

    Args:
        steps: recorded steps with `index` and `parent`.
    """
    conversations: dict[int, tuple[Message, ...]] = {}
    matcher = _Matcher()
    tools: dict[str, Message] = {}
    turns = []
    for step in steps:
        bodies = (step["request_json"] or "", step["response_json"] or "")
        try:
            chat = read(step["protocol"], *(b.encode("utf-8", "replace") for b in bodies))
            found = {json.dumps(t, sort_keys=True): t for t in chat[1]} if chat else {}
            before = conversations.get(step["parent"], ())
            turn = _turn(step["index"], chat, before, matcher)
        except RecursionError:  # another producer's JSON, nested too deeply
            chat, turn, found = None, None, {}
        if chat and turn:  # shares the parent's messages: memory does not grow with their square
            conversations[step["index"]] = before[: turn.repeated] + chat[0][turn.repeated :]
        tools |= found
        turns.append(turn or Turn(0, (), None, bodies))
    return turns, list(tools.values())


def _turn(
    index: int, chat: Chat | None, before: Sequence[Message], matcher: _Matcher
) -> Turn | None:
    if chat is None:
        return None
    messages = chat[0]
    repeated = min(_common(before, messages), len(messages) - 1)
    added = tuple(matcher.part(m, index) for m in messages[repeated:-1])
    return Turn(repeated, added, matcher.part(messages[-1], index), None)


def _common(before: Sequence[Message], now: Sequence[Message]) -> int:
    """Return how many first messages are equal, as far as they are shown."""
    length = min(len(before), len(now))
    return next((i for i in range(length) if _shown(before[i]) != _shown(now[i])), length)


def _shown(message: Message) -> tuple[Any, ...]:
    calls = tuple((c.call_id, c.name, c.arguments) for c in _calls(message, 0))
    return message.get("role"), text_of(message), images_of(message), calls


class _Matcher:
    """Matches tool results with calls, by the newest call of an id."""

    def __init__(self) -> None:
        self._calls: dict[str, ToolCall] = {}
        self._answered: set[ToolCall] = set()

    def part(self, message: Message, step: int) -> Part:
        made = tuple(self._known(call) for call in _calls(message, step))
        answered = self._calls.get(str(message.get("tool_call_id")))
        first = answered is not None and answered not in self._answered
        if answered is not None:
            self._answered.add(answered)
        role, text, images = str(message.get("role")), text_of(message), images_of(message)
        return Part(role, text, images, made, answered, first)

    def _known(self, call: ToolCall) -> ToolCall:
        """Return the call as it was first seen: a request may repeat it."""
        before = self._calls.get(call.call_id)
        if before is not None and before._replace(step=call.step) == call:
            return before
        self._calls[call.call_id] = call
        return call


def _calls(message: Message, step: int) -> list[ToolCall]:
    found = []
    made = message.get("tool_calls")
    for call in made if isinstance(made, list) else ():
        inner = call.get("function") if isinstance(call, dict) else None
        if isinstance(inner, dict):
            given = inner.get("arguments")
            text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            name = str(inner.get("name") or "(no name)")
            found.append(ToolCall(str(call.get("id") or ""), name, text, step))
    return found


def text_of(message: Message) -> str:
    """Return the text of a message; content that is neither text nor an image as JSON."""
    if message.get("content") is None:
        refusal = message.get("refusal")
        return refusal if isinstance(refusal, str) else ""
    return "\n".join(
        block["text"]
        if isinstance(block, dict) and isinstance(block.get("text"), str)
        else block if isinstance(block, str)
        else json.dumps(block, ensure_ascii=False)
        for block in _blocks(message)
        if _image(block) is None
    )  # fmt: skip


def images_of(message: Message) -> tuple[str, ...]:
    """Return the images that a message holds, as data URLs. Those of other hosts are text."""
    return tuple(url for block in _blocks(message) if (url := _image(block)) is not None)


def _blocks(message: Message) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else [] if content is None else [content]


def _image(block: Any) -> str | None:
    """Return the data URL of an image of Chat Completions, Responses or Messages."""
    match block:
        case {"image_url": {"url": str(url)}} | {"image_url": str(url)}:
            pass
        case {"source": {"media_type": str(kind), "data": str(data)}}:
            url = f"data:{kind};base64,{data}"
        case _:
            return None
    return url if _DATA_URL.match(url) else None


def brief(reply: Part | None) -> str:
    """Return a reply in one line: its calls, or the beginning of its text."""
    if reply is None:
        return ""
    if reply.calls:
        return "; ".join(f"{c.name}({c.arguments})" for c in reply.calls)
    return " ".join(reply.text.split())[:400]
