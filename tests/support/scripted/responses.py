"""Speak OpenAI Responses as an engine: a server of `ScriptedEngine`."""

from __future__ import annotations

from collections.abc import Iterator

import orjson
from support.scripted.script import Event, Json, Script, ScriptedChoice, openai_error

_LAST_KEYS = ("type", "name")


class ResponsesServer:
    """Write Responses as vLLM 0.32 does.

    The last event is always `response.completed`; an aborted reply has the status completed.
    """

    path = "/v1/responses"

    def prompts(self, request: Json) -> int:
        return 1

    def plain(self, request: Json, script: Script) -> Json:
        (scripted,) = script.choices
        output = [
            item | {"status": None} if item["type"] == "reasoning" else item
            for item in _items(request, script)
        ]
        return _response(
            request,
            script,
            "incomplete" if scripted.finish_reason == "length" else "completed",
            output,
        )

    def events(self, request: Json, script: Script) -> Iterator[Event]:
        shown = 0
        for number, (said, sampled) in enumerate(_events(request, script)):
            said["sequence_number"] = number
            ordered = dict(
                sorted(
                    said.items(),
                    key=lambda entry: (entry[0] in _LAST_KEYS, entry[0] == "name", entry[0]),
                )
            )
            data = f"event: {said['type']}\ndata: ".encode() + orjson.dumps(ordered) + b"\n\n"
            yield Event(data, [(0, shown, sampled)] if sampled > shown else [])
            shown = max(shown, sampled)

    def error(self, status: int) -> Json:
        return openai_error(status)

    def failure(self) -> bytes:
        """Return an error event in OpenAI's format; vLLM breaks the connection instead."""
        said = {
            "type": "error",
            "code": "server_error",
            "message": "scripted",
            "param": None,
            "sequence_number": 99,
        }
        return b"event: error\ndata: " + orjson.dumps(said) + b"\n\n"


def _response(request: Json, script: Script, status: str, output: list[Json]) -> Json:
    """Return the response object with the fields that the request sets."""
    asked, sampled = len(script.prompt_ids), sum(len(s.ids) for s in script.choices)
    usage: Json = {
        "input_tokens": asked,
        "input_tokens_details": {
            "cached_tokens": 0, "cache_write_tokens": 0, "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": sampled,
        "output_tokens_details": {
            "reasoning_tokens": 0, "tool_output_tokens": 0, "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": asked + sampled,
    }  # fmt: skip
    tools = request.get("tools") or []
    return {
        "id": f"resp_{script.number}", "created_at": 1,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": request.get("instructions"), "metadata": request.get("metadata"),
        "model": request.get("model") or "policy", "object": "response", "output": output,
        "parallel_tool_calls": request.get("parallel_tool_calls", True),
        "temperature": request.get("temperature", 1.0),
        "tool_choice": request.get("tool_choice", "auto") if tools else "none", "tools": tools,
        "top_p": 1.0,
        "background": False, "max_output_tokens": request.get("max_output_tokens", 1000),
        "max_tool_calls": None,
        "previous_response_id": None, "prompt": None, "reasoning": request.get("reasoning"),
        "service_tier": "auto",
        "status": status, "text": request.get("text"), "top_logprobs": request.get("top_logprobs"),
        "truncation": "disabled", "usage": None if status == "in_progress" else usage, "user": None,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "kv_transfer_params": None,
        "ec_transfer_params": None, "input_messages": None, "output_messages": None,
    }  # fmt: skip


def _reasoning(id_: str, status: str, content: list[Json] | None) -> Json:
    return {
        "id": id_, "summary": [], "type": "reasoning", "content": content,
        "encrypted_content": None, "status": status,
    }  # fmt: skip


def _message(id_: str, status: str, content: list[Json]) -> Json:
    return {
        "id": id_, "content": content, "role": "assistant", "status": status, "type": "message",
        "phase": None,
    }  # fmt: skip


def _call(id_: str, status: str, call: Json, arguments: str) -> Json:
    return {
        "arguments": arguments, "call_id": call["id"], "name": call["function"]["name"],
        "type": "function_call",
        "id": id_, "async": None, "caller": None, "namespace": call.get("namespace"),
        "status": status,
    }  # fmt: skip


def _logprobs(
    request: Json, script: Script, scripted: ScriptedChoice, first: int, last: int
) -> list[Json]:
    if "message.output_text.logprobs" not in (request.get("include") or ()) or script.no_tokens:
        return []
    return [
        {"token": scripted.texts[i] or "", "logprob": scripted.logprobs[i], "top_logprobs": []}
        for i in range(first, last)
    ]


def _text_part(request: Json, script: Script, scripted: ScriptedChoice) -> Json:
    text = "".join(t for t in scripted.texts[scripted.reasoning :] if t)
    told = [
        {
            "token": e["token"],
            "bytes": list(e["token"].encode()),
            "logprob": e["logprob"],
            "top_logprobs": [],
        }
        for e in _logprobs(request, script, scripted, scripted.reasoning, len(scripted.ids))
        if e["token"]
    ]
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": told or None}


def _items(request: Json, script: Script) -> list[Json]:
    """Return the items of the whole output."""
    (scripted,) = script.choices
    items: list[Json] = []
    if thought := "".join(t for t in scripted.texts[: scripted.reasoning] if t):
        items.append(
            _reasoning(
                f"rs_{script.number}_0", "completed", [{"text": thought, "type": "reasoning_text"}]
            )
        )
    part = _text_part(request, script, scripted)
    if part["text"]:
        items.append(_message(f"msg_{script.number}_{len(items)}", "completed", [part]))
    for call in scripted.tool_calls:
        items.append(
            _call(
                f"fc_{script.number}_{len(items)}", "completed", call, call["function"]["arguments"]
            )
        )
    return items


def _events(request: Json, script: Script) -> Iterator[tuple[Json, int]]:
    """Yield all events, each with the number of tokens sampled so far."""
    (scripted,) = script.choices
    begun = _response(request, script, "in_progress", [])
    yield {"response": begun, "sequence_number": 0, "type": "response.created"}, 0
    yield {"response": begun, "sequence_number": 0, "type": "response.in_progress"}, 0
    items = _items(request, script)
    for index, item in enumerate(items):
        match item["type"]:
            case "reasoning":
                yield from _reasoning_events(index, item, scripted)
            case "message":
                yield from _message_events(index, item, request, script)
            case _:
                yield from _call_events(
                    index, item, scripted.tool_calls[index - len(items)], len(scripted.ids)
                )
    status = "incomplete" if scripted.finish_reason == "length" else "completed"
    ended = _response(request, script, status, items)
    yield {"response": ended, "sequence_number": 0, "type": "response.completed"}, len(scripted.ids)


def _place(index: int, item: Json) -> Json:
    return {"item_id": item["id"], "output_index": index, "sequence_number": 0}


def _added(index: int, item: Json) -> Json:
    return {
        "item": item,
        "output_index": index,
        "sequence_number": 0,
        "type": "response.output_item.added",
    }


def _done(index: int, item: Json) -> Json:
    return {
        "item": item,
        "output_index": index,
        "sequence_number": 0,
        "type": "response.output_item.done",
    }


def _reasoning_events(
    index: int, item: Json, scripted: ScriptedChoice
) -> Iterator[tuple[Json, int]]:
    (part,) = item["content"]
    place = {"content_index": 0, **_place(index, item)}
    pieces = [(at, t) for at, t in enumerate(scripted.texts[: scripted.reasoning]) if t]
    first, end = pieces[0][0] + 1, pieces[-1][0] + 1
    yield _added(index, _reasoning(item["id"], "in_progress", None)), first
    yield (
        place
        | {"part": {"text": "", "type": "reasoning_text"}, "type": "response.content_part.added"},
        first,
    )
    for at, piece in pieces:
        yield place | {"delta": piece, "type": "response.reasoning_text.delta"}, at + 1
    yield place | {"text": part["text"], "type": "response.reasoning_text.done"}, end
    yield place | {"part": part, "type": "response.content_part.done"}, end
    yield _done(index, item), end


def _message_events(
    index: int, item: Json, request: Json, script: Script
) -> Iterator[tuple[Json, int]]:
    (scripted,), (part,) = script.choices, item["content"]
    place = {"content_index": 0, **_place(index, item)}
    pieces = [(at, t) for at, t in enumerate(scripted.texts) if t and at >= scripted.reasoning]
    first, end = pieces[0][0] + 1, pieces[-1][0] + 1
    yield _added(index, _message(item["id"], "in_progress", [])), first
    empty = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
    yield place | {"part": empty, "type": "response.content_part.added"}, first
    for at, piece in pieces:
        told = _logprobs(request, script, scripted, at, at + 1)
        yield (
            place | {"delta": piece, "logprobs": told, "type": "response.output_text.delta"},
            at + 1,
        )
    yield place | {"logprobs": [], "text": part["text"], "type": "response.output_text.done"}, end
    yield place | {"part": part, "type": "response.content_part.done"}, end
    yield _done(index, item), end


def _call_events(index: int, item: Json, call: Json, sampled: int) -> Iterator[tuple[Json, int]]:
    place, arguments = _place(index, item), item["arguments"]
    yield _added(index, _call(item["id"], "in_progress", call, "")), sampled
    yield place | {"delta": arguments, "type": "response.function_call_arguments.delta"}, sampled
    done = {
        "arguments": arguments,
        "type": "response.function_call_arguments.done",
        "name": item["name"],
    }
    yield place | done, sampled
    yield _done(index, item), sampled
