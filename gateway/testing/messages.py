"""Anthropic messages from the engine's side: a voice of `scripted_engine`."""

from __future__ import annotations

from collections.abc import Iterator

import orjson

from gateway.testing.script import Event, Json, Say, Script

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_SIGNATURE = "5c5c5c"


class MessagesVoice:
    """Messages as vLLM 0.32 writes them. Other than plain replies, streams have no block for an empty text, and say null of an abort."""

    path = "/v1/messages"

    def prompts(self, request: Json) -> int:
        return 1

    def plain(self, request: Json, script: Script) -> Json:
        (say,) = script.says
        content = _blocks(say)
        reason = _STOP_REASONS.get(say.finish_reason)
        return {
            "id": f"chatcmpl-{script.number}", "type": "message", "role": "assistant",
            "content": content or [{"type": "text", "text": ""}], "model": request.get("model") or "policy",
            **({} if reason is None else {"stop_reason": reason}), "usage": _usage(script, len(say.ids)),
        }  # fmt: skip

    def events(self, request: Json, script: Script) -> Iterator[Event]:
        (say,) = script.says
        message: Json = {
            "id": f"chatcmpl-{script.number}", "type": "message", "role": "assistant", "content": [],
            "model": request.get("model") or "policy", "stop_reason": None, "stop_sequence": None,
            "usage": _usage(script, 0),
        }  # fmt: skip
        yield _event({"type": "message_start", "message": message})
        shown = 0
        for event, sampled in _block_events(say):
            yield Event(event, [(0, shown, sampled)] if sampled > shown else [])
            shown = max(shown, sampled)
        delta = {"stop_reason": _STOP_REASONS.get(say.finish_reason), "stop_sequence": None}
        rest = [(0, shown, len(say.ids))] if shown < len(say.ids) else []
        ended = {"type": "message_delta", "delta": delta, "usage": _usage(script, len(say.ids))}
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


def _blocks(say: Say) -> list[Json]:
    blocks: list[Json] = []
    thinking = "".join(t for t in say.texts[: say.reasoning] if t)
    text = "".join(t for t in say.texts[say.reasoning :] if t)
    if thinking:
        blocks.append({"type": "thinking", "thinking": thinking, "signature": _SIGNATURE})
    if text:
        blocks.append({"type": "text", "text": text})
    for call in say.tool_calls:
        given = orjson.loads(call["function"]["arguments"])
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given}
        )
    return blocks


def _block_events(say: Say) -> Iterator[tuple[bytes, int]]:
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

    for at, piece in enumerate(say.texts):
        if not piece:
            continue
        wanted = "thinking" if at < say.reasoning else "text"
        if kind != wanted:
            if kind:
                yield from ((event, at + 1) for event in stop())
                index += 1
            kind = wanted
            yield start({"type": kind, kind: ""}), at + 1
        yield delta(type=f"{kind}_delta", **{kind: piece}), at + 1
    for call in say.tool_calls:
        if kind:
            yield from ((event, len(say.ids)) for event in stop())
            index += 1
        kind = "tool_use"
        yield (
            start({"type": kind, "id": call["id"], "name": call["function"]["name"], "input": {}}),
            len(say.ids),
        )
        yield (
            delta(type="input_json_delta", partial_json=call["function"]["arguments"]),
            len(say.ids),
        )
    if kind:
        yield from ((event, len(say.ids)) for event in stop())
