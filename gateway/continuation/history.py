"""Read the conversation of a request so that it can be compared with later requests. Pure.

Agents send the same history in other forms: strings become text blocks, `cache_control` moves,
arguments of tool calls are serialized again, reasoning is left out. Such histories are equal here.
Turns of the model are compared by their words and calls only, because their tokens are known.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from clawstream.gateway.attribution.conversation import SYSTEM_ROLES, system_text, turns
from clawstream.schemas.conversation import calls_of, is_model_item, items_of, texts_of
from clawstream.schemas.conversation.protocols import SAID_BLOCKS

FIRST_TURN = "first_turn"
PREFILLED = "prefilled"
STORED_HISTORY = "stored_history"
SYSTEM_CHANGED = "system_changed"
UNREADABLE = "unreadable"
TEMPLATE_FIELDS = (
    *("chat_template", "chat_template_kwargs", "documents", "add_special_tokens"),
    *("add_generation_prompt", "continue_final_message", "reasoning_effort", "reasoning"),
    *("thinking", "output_config", "truncate_prompt_tokens", "truncation"),
)
"""Fields of a request that change how the template renders the conversation."""
STORED = ("previous_response_id", "previous_input_messages", "conversation", "prompt")
"""Fields of Responses that name a history outside of the request."""
BILLING = "x-anthropic-billing-header"
"""Start of a line of Claude Code that differs in each request; vLLM leaves it out."""
_EXACT_FLOAT = 2**53


class Context(NamedTuple):
    """Digests of what must stay the same beside the messages."""

    model: bytes
    system: bytes
    tools: bytes
    template: bytes

    def change(self, later: Context) -> str | None:
        """Return the reason of the first difference, e.g. `tools_changed`; None: they are equal."""
        for name, old, new in zip(self._fields, self, later, strict=True):
            if old != new:
                return f"{name}_changed"
        return None


class History(NamedTuple):
    """A conversation.

    continued: Digest of the messages up to the last turn of the model; None: there is none.
    whole: Digest of all messages.
    blocked: Why it cannot continue an earlier turn, whatever is known of that turn.
    """

    context: Context
    continued: bytes | None
    whole: bytes
    blocked: str | None


def history_of(payload: Mapping[str, Any]) -> History | None:
    """Read a request of chat completions, Messages or Responses; None: it cannot be compared."""
    items = turns(payload)
    first = next((i for i, item in enumerate(items) if not _is_system(item)), len(items))
    try:
        context = Context(
            _digest(payload.get("model")),
            _digest(_without_billing(system_text(payload))),
            _digest(_plain(payload.get("tools"))),
            _digest({f: _plain(payload[f]) for f in TEMPLATE_FIELDS if f in payload}),
        )
        whole, continued, last = b"", None, False
        for is_model, turn in _grouped(items[first:]):
            whole = _chained(whole, turn)
            last = is_model
            if is_model:
                continued = whole
    except (orjson.JSONEncodeError, RecursionError):
        return None
    return History(context, continued, whole, _blocked(payload, items, continued, last))


def _blocked(
    payload: Mapping[str, Any], items: Sequence[Any], continued: bytes | None, last: bool
) -> str | None:
    if any(payload.get(name) for name in STORED) or any(map(_is_reference, items)):
        return STORED_HISTORY
    if continued is None:
        return FIRST_TURN
    if last:
        return PREFILLED
    # vLLM may move such a text to the beginning of the prompt, which is kept.
    at = next(i for i in range(len(items) - 1, -1, -1) if is_model_item(items[i]))
    return SYSTEM_CHANGED if any(map(_is_system, items[at:])) else None


def after_reply(history: History, response_json: bytes) -> bytes | None:
    """Return `continued` of a request that continues the reply to this one; None: unreadable."""
    try:
        items = items_of(orjson.loads(response_json))
        return _chained(history.whole, _model_turn(items)) if items else None
    except (orjson.JSONDecodeError, orjson.JSONEncodeError, RecursionError):
        return None


def _grouped(items: Sequence[Any]) -> Iterator[tuple[bool, Any]]:
    """Yield turns and whether the model made them; adjacent items of the model are one turn."""
    run: list[Any] = []
    for item in items:
        if is_model_item(item):
            run.append(item)
            continue
        if run:
            yield True, _model_turn(run)
            run = []
        yield False, _given(item)
    if run:
        yield True, _model_turn(run)


def _is_system(item: Any) -> bool:
    return isinstance(item, dict) and item.get("role") in SYSTEM_ROLES


def _is_reference(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == "item_reference"


def _model_turn(items: Sequence[Mapping[str, Any]]) -> Any:
    """Return the words and calls of the model. Agents drop reasoning and give calls other ids."""
    calls = [[call.name, _plain(_parsed(call.given))] for item in items for call in calls_of(item)]
    return ["model", "\n".join(text for item in items for text in texts_of(item)).strip(), calls]


def _parsed(arguments: Any) -> Any:
    try:
        return orjson.loads(arguments) if isinstance(arguments, str) else arguments
    except orjson.JSONDecodeError:
        return arguments


def _given(item: Any) -> Any:
    """Return a message of the agent in one of its forms."""
    content = item.get("content") if isinstance(item, dict) else None
    if isinstance(content, list) and all(
        isinstance(block, dict) and block.get("type") in (*SAID_BLOCKS, "input_text")
        for block in content
    ):
        item = {**item, "content": "\n".join(str(block.get("text")) for block in content)}
    return _plain(item)


def _plain(value: Any) -> Any:
    """Return a value without marks for caches, nulls, and the difference between 1 and 1.0."""
    if isinstance(value, str):  # as a rule
        return value
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if v is not None and k != "cache_control"}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT_FLOAT:
        return int(value)
    return value


def _without_billing(text: str) -> str:
    return "\n".join(line for line in text.split("\n") if not line.startswith(BILLING))


def _dumped(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def _digest(value: Any) -> bytes:
    return hashlib.sha256(_dumped(value)).digest()


def _chained(before: bytes, turn: Any) -> bytes:
    return hashlib.sha256(before + _dumped(turn)).digest()
