"""What a request says, as text, whichever protocol it came by: system prompt, first and last turn of the user. Pure.

OpenAI chat and Anthropic have `messages` (Anthropic's system prompt is beside them, or among them), Responses has `input` and
`instructions`, completions `prompt`. Nothing here trusts a shape: what is not as expected counts as not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gateway.protocols.request_fields import dumps

SYSTEM_ROLES = ("system", "developer")
TEXT_TYPES = ("text", "input_text", "output_text")


def turns(said: Mapping[str, Any]) -> list[Any]:
    """The conversation, oldest first; a request without one gives none."""
    for name in ("messages", "input"):
        found = said.get(name)
        if isinstance(found, list):
            return found
    text = said.get("input")
    return [{"role": "user", "content": text}] if isinstance(text, str) else []


def _pieces(content: Any) -> Iterator[str]:
    """The texts of a content: a string, or a list of blocks."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for block in content:
            if isinstance(block, str):
                yield block
            elif (
                isinstance(block, dict)
                and block.get("type") in TEXT_TYPES
                and isinstance(block.get("text"), str)
            ):
                yield block["text"]


def text_of(content: Any, most: int | None = None) -> str:
    """All text of a content, a line break between blocks; of each block the first `most` characters."""
    return (
        content[:most]
        if isinstance(content, str)
        else "\n".join(piece[:most] for piece in _pieces(content))
    )


def system_text(said: Mapping[str, Any], most: int | None = None) -> str:
    """The system prompt: what stands before the conversation, and the system messages that begin it. Of each block `most` characters."""
    found = [text_of(said[name], most) for name in ("system", "instructions") if said.get(name)]
    for turn in turns(said):
        if not isinstance(turn, dict) or turn.get("role") not in SYSTEM_ROLES:
            break
        found.append(text_of(turn.get("content"), most))
    return "\n".join(found)


def _of_user(found: Iterable[Any]) -> Any:
    return next((t for t in found if isinstance(t, dict) and t.get("role") == "user"), {}).get(
        "content"
    )


def first_user_text(said: Mapping[str, Any], most: int | None = None) -> str:
    """Text of the user's first message; of each block the first `most` characters."""
    return text_of(_of_user(turns(said)), most)


def last_user_text(said: Mapping[str, Any], most: int | None = None) -> str:
    """Text of the user's last message, without results of tools; of each block the first `most` characters."""
    return text_of(_of_user(reversed(turns(said))), most)


def first_user_turn(said: Mapping[str, Any]) -> bytes:
    """The user's first message in a form that all later calls of its conversation give too: canonical bytes.

    Agents turn a string into a list of one block and back, and move `cache_control` about: both are undone. A completions prompt is
    one turn as a whole, text or token ids. A request without a user's message gives its first message, an empty one b"". Raises BadRequest.
    """
    found = turns(said)
    content = _of_user(found)
    if content is None:
        content = said.get("prompt") if "prompt" in said else (found or [None])[0]
    if content is None:
        return b""
    if isinstance(content, list) and any(isinstance(block, dict) for block in content):
        texts = list(_pieces(content))
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
