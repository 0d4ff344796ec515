"""What each step adds to the conversation, with tool results named by their calls. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from clawstream.schemas.conversation import Chat, image_url_of

Message = Mapping[str, Any]
ReadChat = Callable[[str, bytes, bytes], Chat | None]
"""Reads (protocol, request, response) of a step; None: no chat."""


TEXT_CHARACTERS = 100_000
"""Characters of a text that a page shows; the whole text has a page of its own."""
TURN_CHARACTERS = 1_000_000
"""Of all messages of a step; the first ones are left out."""
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

    number: place in the messages of its step. text, reasoning: the first `TEXT_CHARACTERS`. left:
    number of further characters. images: data URLs. answers: the call that a tool's result answers.
    first: whether the result is shown first here.
    """

    number: int
    role: str
    text: str
    reasoning: str
    left: int
    images: tuple[str, ...]
    calls: tuple[ToolCall, ...]
    answers: ToolCall | None
    first: bool

    @property
    def size(self) -> int:
        """The characters that a page needs for it."""
        calls = sum(len(call.arguments) for call in self.calls)
        return len(self.text) + len(self.reasoning) + sum(map(len, self.images)) + calls


class Turn(NamedTuple):
    """What a step adds: the messages before the reply that no earlier step has, and the reply.

    repeated: number of first messages that an earlier step has, too. like: the first such step;
    None: there is none. continues: the last of them is its reply. left_out: messages that are too
    much for a page. raw: the bodies, if they are no chat.
    """

    repeated: int
    like: int | None
    continues: bool
    left_out: int
    added: tuple[Part, ...]
    reply: Part | None
    raw: tuple[str, str] | None

    @property
    def size(self) -> int:
        """The characters that a page needs for it."""
        parts = (*self.added, *([self.reply] if self.reply else []))
        raw = sum(min(len(body), TEXT_CHARACTERS) for body in self.raw or ())
        return raw + sum(part.size for part in parts)


class Conversation:
    """Reads the steps of a trajectory in order.

    tools: the definitions of all tools so far, by their JSON.
    """

    def __init__(self, read: ReadChat) -> None:
        self._read, self._matcher, self._known = read, _Matcher(), _KnownMessages()
        self.tools: dict[str, Message] = {}

    def turn(self, step: Mapping[str, Any]) -> Turn:
        """Return what a step adds. step: recorded, with `index`."""
        bodies = (step["request_json"] or "", step["response_json"] or "")
        try:
            chat = self._read(step["protocol"], *(b.encode("utf-8", "replace") for b in bodies))
            if chat is not None:
                turn = self._turn(step["index"], chat.messages)
                self.tools |= {json.dumps(t, sort_keys=True): t for t in chat.tools}
                return turn
        except RecursionError:  # another producer's JSON, nested too deeply
            pass
        return Turn(0, None, False, 0, (), None, bodies)

    def _turn(self, index: int, messages: Sequence[Message]) -> Turn:
        repeated, like, continues = self._known.add(messages, index)
        parts = [self._matcher.part(i, messages[i], index) for i in range(repeated, len(messages))]
        *added, reply = parts
        size, first = 0, len(added)
        while first and size + added[first - 1].size <= TURN_CHARACTERS:
            first -= 1
            size += added[first].size
        return Turn(repeated, like, continues, first, tuple(added[first:]), reply, None)


def turns_of(
    steps: Iterable[Mapping[str, Any]], read: ReadChat
) -> tuple[list[Turn], list[Message]]:
    """Return the turn of each step, in order, and the definitions of all tools."""
    conversation = Conversation(read)
    turns = [conversation.turn(step) for step in steps]
    return turns, list(conversation.tools.values())


class _KnownMessages:
    """The messages of all steps so far, as a tree of prefixes: equal beginnings are kept once."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, bytes], tuple[int, int, bool]] = {}

    def add(self, messages: Sequence[Message], index: int) -> tuple[int, int | None, bool]:
        """Add the messages of a step, the reply last.

        Returns:
            How many messages before the reply are known, the first step that had the last one of
            them, and whether it was its reply.
        """
        node, known, like, continues = 0, 0, None, False
        for place, message in enumerate(messages):
            key = node, _digest(message)
            is_reply = place == len(messages) - 1
            if key not in self._nodes:
                self._nodes[key] = len(self._nodes) + 1, index, is_reply
            elif known == place and not is_reply:
                known, (_, like, continues) = place + 1, self._nodes[key]
            node = self._nodes[key][0]
        return known, like, continues


def _digest(message: Message) -> bytes:
    """Return the same bytes for messages that are shown alike. A request omits reasoning."""
    calls = tuple((c.call_id, c.name, c.arguments) for c in _calls(message, 0))
    shown = message.get("role"), text_of(message), images_of(message), calls
    return blake2b(repr(shown).encode("utf-8", "surrogatepass"), digest_size=16).digest()


class _Matcher:
    """Matches tool results with calls, by the newest call of an id."""

    def __init__(self) -> None:
        self._calls: dict[str, ToolCall] = {}
        self._answered: set[ToolCall] = set()

    def part(self, number: int, message: Message, step: int) -> Part:
        made = tuple(self._known(call) for call in _calls(message, step))
        answered = self._calls.get(str(message.get("tool_call_id")))
        first = answered is not None and answered not in self._answered
        if answered is not None:
            self._answered.add(answered)
        text, thought = text_of(message), message.get("reasoning_content")
        thought = thought if isinstance(thought, str) else ""
        left = sum(max(0, len(t) - TEXT_CHARACTERS) for t in (text, thought))
        return Part(
            number, str(message.get("role")), text[:TEXT_CHARACTERS], thought[:TEXT_CHARACTERS],
            left, images_of(message), made, answered, first,
        )  # fmt: skip

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
    """Return the data URL of an image."""
    url = image_url_of(block)
    return url if url is not None and _DATA_URL.match(url) else None


def brief(reply: Part | None) -> str:
    """Return a reply in one line: its calls, or the beginning of its text."""
    if reply is None:
        return ""
    if reply.calls:
        return "; ".join(f"{c.name}({c.arguments})" for c in reply.calls)
    return " ".join(reply.text.split())[:400]
