"""Speak Anthropic messages as an engine: a server of `ScriptedEngine`."""

from __future__ import annotations

from collections.abc import Iterator

import orjson
from support.scripted.script import Event, Json, Script, ScriptedChoice

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_SIGNATURE = "5c5c5c"


class MessagesServer:
    """Write messages as vLLM 0.32 does.

    Unlike plain replies, streams have no block for an empty text, and report an abort as null.
    """

    path = "/v1/messages"

    def prompts(self, request: Json) -> int:
        return 1

    def plain(self, request: Json, script: Script) -> Json:
        (scripted,) = script.choices
        content = _blocks(scripted)
        reason = _STOP_REASONS.get(scripted.finish_reason)
        return {
            "id": f"chatcmpl-{script.number}", "type": "message", "role": "assistant",
            "content": content or [{"type": "text", "text": ""}],
            "model": request.get("model") or "policy",
            **({} if reason is None else {"stop_reason": reason}),
            "usage": _usage(script, len(scripted.ids)),
        }  # fmt: skip

    def events(self, request: Json, script: Script) -> Iterator[Event]:
        (scripted,) = script.choices
        message: Json = {
            "id": f"chatcmpl-{script.number}", "type": "message", "role": "assistant",
            "content": [],
            "model": request.get("model") or "policy", "stop_reason": None, "stop_sequence": None,
            "usage": _usage(script, 0),
        }  # fmt: skip
        yield _event({"type": "message_start", "message": message})
        shown = 0
        for event, sampled in _block_events(scripted):
            yield Event(event, [(0, shown, sampled)] if sampled > shown else [])
            shown = max(shown, sampled)
        delta = {"stop_reason": _STOP_REASONS.get(scripted.finish_reason), "stop_sequence": None}
        rest = [(0, shown, len(scripted.ids))] if shown < len(scripted.ids) else []
        ended = {
            "type": "message_delta",
            "delta": delta,
            "usage": _usage(script, len(scripted.ids)),
        }
        yield _event(ended)._replace(shows=rest)
        yield _event({"type": "message_stop"})

    def error(self, status: int) -> Json:
        return {"type": "error", "error": {"type": "BadRequestError", "message": "scripted"}}

    def failure(self) -> bytes:
        return _event(
            {"type": "error", "error": {"type": "internal_error", "message": "scripted"}}
        ).data


def _event(said: Json) -> Event:
    return Event(f"event: {said['type']}\ndata: ".encode() + orjson.dumps(said) + b"\n\n")


def _usage(script: Script, sampled: int) -> Json:
    return {"input_tokens": len(script.prompt_ids), "output_tokens": sampled}


def _blocks(scripted: ScriptedChoice) -> list[Json]:
    blocks: list[Json] = []
    thinking = "".join(t for t in scripted.texts[: scripted.reasoning] if t)
    text = "".join(t for t in scripted.texts[scripted.reasoning :] if t)
    if thinking:
        blocks.append({"type": "thinking", "thinking": thinking, "signature": _SIGNATURE})
    if text:
        blocks.append({"type": "text", "text": text})
    for call in scripted.tool_calls:
        given = orjson.loads(call["function"]["arguments"])
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given}
        )
    return blocks


def _block_events(scripted: ScriptedChoice) -> Iterator[tuple[bytes, int]]:
    """The events of all blocks, and how many tokens have been sampled when each is written."""
    index, kind = 0, ""

    def delta(**said: str) -> bytes:
        return _event({"type": "content_block_delta", "delta": said, "index": index}).data

    def stop() -> Iterator[bytes]:
        if kind == "thinking":
            yield delta(type="signature_delta", signature=_SIGNATURE)
        yield _event({"type": "content_block_stop", "index": index}).data

    def start(block: Json) -> bytes:
        return _event({"type": "content_block_start", "content_block": block, "index": index}).data

    for at, piece in enumerate(scripted.texts):
        if not piece:
            continue
        wanted = "thinking" if at < scripted.reasoning else "text"
        if kind != wanted:
            if kind:
                yield from ((event, at + 1) for event in stop())
                index += 1
            kind = wanted
            yield start({"type": kind, kind: ""}), at + 1
        yield delta(type=f"{kind}_delta", **{kind: piece}), at + 1
    for call in scripted.tool_calls:
        if kind:
            yield from ((event, len(scripted.ids)) for event in stop())
            index += 1
        kind = "tool_use"
        yield (
            start({"type": kind, "id": call["id"], "name": call["function"]["name"], "input": {}}),
            len(scripted.ids),
        )
        yield (
            delta(type="input_json_delta", partial_json=call["function"]["arguments"]),
            len(scripted.ids),
        )
    if kind:
        yield from ((event, len(scripted.ids)) for event in stop())
