"""Fill templates with the metadata and replies of a trajectory, for models that read text. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import orjson

from clawstream.rewards.answer import metadata
from clawstream.rewards.turns import new_messages, next_messages, turns_until
from clawstream.schemas.conversation import calls_in, loaded, texts_in
from clawstream.schemas.records import Trajectory, TrajectoryStep

_PLACE = re.compile(r"\{([a-z_]+)(?:\.([^{}]+))?\}")
CONVERSATION_BYTES = 64 << 10
"""Longest `{conversation}`, as JSON. Each step of a long trajectory is judged with the turns before
it, and a model reads only as much as its context holds.
"""
PLACES = ("metadata", "answer", "replies", "conversation")


def check_template(template: str, *more: str) -> None:
    """Raise ValueError for a placeholder that does not exist. more: placeholders beside PLACES."""
    places = (*PLACES, *more)
    for name, key in _PLACE.findall(template):
        if name not in places or (key and name != "metadata"):
            raise ValueError(f"template: no placeholder {name}; there are {', '.join(places)}")


def filled(
    template: str,
    trajectory: Trajectory,
    steps: Sequence[TrajectoryStep],
    *,
    as_json: bool = False,
) -> str:
    """Return the template with its placeholders replaced, once: what replaces them is not read.

    Args:
        template: `{metadata}` is the metadata as JSON, `{metadata.KEY}` one field of it,
            `{replies}` what the agent said and called in `steps`, `{answer}` the last of these,
            `{conversation}` the messages and replies until the last of `steps`, a JSON array whose
            oldest messages are left out beyond CONVERSATION_BYTES, `{next}` the messages that
            followed it, a JSON array.
        steps: One or more.
        as_json: Whether `{replies}` is a JSON array of strings and `{answer}` a JSON string, so
            that no reply can look like another one, or like the text around it.

    Raises:
        ValueError: The metadata lacks the field, or is no JSON object; the messages of a step are
            not recorded.
    """

    def value(match: re.Match[str]) -> str:
        name, key = match.groups()
        if name == "answer":
            return _json(said_in(steps[-1])) if as_json else said_in(steps[-1])
        if name == "replies":
            replies = [said_in(step) for step in steps]
            if as_json:
                return _json(replies)
            return "\n\n".join(f"[{i}] {reply}" for i, reply in enumerate(replies, start=1))
        if name == "conversation":
            return _json(_conversation(turns_until(trajectory, steps[-1])))
        if name == "next":
            return _json(next_messages(trajectory, steps[-1]))
        fields = metadata(trajectory)
        if key is None:
            return _json(fields)
        if key not in fields:
            raise ValueError(f"metadata has no {key}")
        return _text(fields[key])

    return _PLACE.sub(value, template)


def _conversation(turns: Sequence[TrajectoryStep]) -> list[Any]:
    """Return the messages of turns, each reply as text; the last one and the newest that fit."""
    messages = list[Any]()
    for step in turns:
        messages += [*new_messages(step), {"role": "assistant", "content": said_in(step)}]
    first, size = len(messages) - 1, len(_json(messages[-1]))
    while first and (size := size + len(_json(messages[first - 1]))) <= CONVERSATION_BYTES:
        first -= 1
    if not first:
        return messages
    left_out = {"role": "system", "content": f"[... {first} earlier messages ...]"}
    return [left_out, *messages[first:]]


def said_in(step: TrajectoryStep) -> str:
    """Return the text of a reply and its tool calls, each on a line."""
    reply = loaded(step.response_json)
    calls = [f"{call.name}({_text(call.given)})" for call in calls_in(reply)]
    return "\n".join([*texts_in(reply), *calls])


def _text(value: Any) -> str:
    """Return text as it is, anything else as JSON."""
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()
