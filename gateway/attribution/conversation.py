"""Read the text of a request in any protocol: system prompt, first and last user turn. Pure.

Content of an unexpected shape counts as absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from clawstream.gateway.protocols.request_fields import dumps
from clawstream.schemas.conversation import history_of, texts_in_content
from clawstream.schemas.conversation.protocols import SYSTEM_FIELDS

SYSTEM_ROLES = ("system", "developer")


def turns(payload: Mapping[str, Any]) -> list[Any]:
    """Return the conversation, oldest turn first; empty for a request without one."""
    return history_of(payload) or []


def text_of(content: Any, most: int | None = None) -> str:
    """Join all text of a content value, with a line break between blocks.

    Args:
        content: A string, or a list of blocks.
        most: Characters to keep of each block; None: all.
    """
    return (
        content[:most]
        if isinstance(content, str)
        else "\n".join(text[:most] for text in texts_in_content(content))
    )


def system_text(payload: Mapping[str, Any], most: int | None = None) -> str:
    """Return the system prompt, `most` characters of each block.

    It consists of the text before the conversation and the system messages at its start.
    """
    fields = [payload.get(name) for name in SYSTEM_FIELDS]
    found = [text_of(field, most) for field in fields if field]
    for turn in turns(payload):
        if not isinstance(turn, dict) or turn.get("role") not in SYSTEM_ROLES:
            break
        found.append(text_of(turn.get("content"), most))
    return "\n".join(found)


def _of_user(found: Iterable[Any]) -> Any:
    return next((t for t in found if isinstance(t, dict) and t.get("role") == "user"), {}).get(
        "content"
    )


def first_user_text(payload: Mapping[str, Any], most: int | None = None) -> str:
    """Return the text of the user's first message, `most` characters of each block."""
    return text_of(_of_user(turns(payload)), most)


def last_user_text(payload: Mapping[str, Any], most: int | None = None) -> str:
    """Return the text of the user's last message, `most` characters of each block.

    Results of tools are not part of it.
    """
    return text_of(_of_user(reversed(turns(payload))), most)


def first_user_turn(payload: Mapping[str, Any]) -> bytes:
    """Return the user's first message as canonical bytes, equal in all calls of a conversation.

    Agents convert a string into a list of one block and back, and move `cache_control` between
    blocks: the canonical form undoes both. A completions prompt, text or token ids, is one turn. A
    request without a user message gives its first message; an empty request gives b"".

    Raises:
        BadRequest: The turn has no canonical form.
    """
    found = turns(payload)
    content = _of_user(found)
    if content is None:
        content = payload.get("prompt") if "prompt" in payload else (found or [None])[0]
    if content is None:
        return b""
    if isinstance(content, list) and any(isinstance(block, dict) for block in content):
        texts = list(texts_in_content(content))
        if len(texts) == len(content):
            content = "\n".join(texts)
        else:
            content = [
                {k: v for k, v in block.items() if k != "cache_control"}
                if isinstance(block, dict)
                else block
                for block in content
            ]
    if isinstance(content, str):
        return content.encode("utf-8", "surrogatepass")
    return dumps(content, sort=True)
