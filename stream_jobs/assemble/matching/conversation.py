"""Model turns in a request, and the hashes that connect a reply with later requests. Pure.

Agents change their history: transient messages move, blocks become strings, reasoning is
dropped, ids lose underscores, templates render calls differently. The model's own words rarely
change. Therefore a reply and the request that continues it share one hash:

- If the last model turn called tools: id, name and arguments of its last call. Ids are reduced
  to letters and digits. Most engines give each call its own id, so a truncated history is found
  as well.
- Otherwise: the texts, without thoughts in tags, and last calls of all model turns so far.

Agents that repeat a reply in another form change, add or remove some of its words (`words_of`).

Chat completions, Messages and Responses are read alike. Unexpected shapes are treated as absent.
"""

from __future__ import annotations

import hashlib
import marshal
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from operator import xor
from typing import Any, NamedTuple
from zlib import crc32

import orjson

from clawstream.schemas.conversation import (
    Call,
    RecordedRequest,
    calls_of,
    is_model_item,
    is_said,
    items_of,
    loaded,
    texts_of,
    without_thoughts,
)
from clawstream.schemas.conversation.protocols import HISTORY_FIELDS, PROMPT_FIELDS, SAID_BLOCKS
from clawstream.stream_jobs.assemble.matching.token_prefix import digest_hash, hash_of

MARSHAL_VERSION = 2
"""The latest version whose bytes depend only on the value."""


CONVERSATION_FIELDS = frozenset({*HISTORY_FIELDS, "prompt"})
TEXT_SEARCHED = 64 << 10
IDS_LOOKED_UP = 256
WORD_BYTES = 256
"""Length of beginning and end of a turn of which the words are read."""
WORDS = 32
_WORDS = re.compile(rb"[0-9A-Za-z_\x80-\xff]+")
_QUOTED = re.compile(r"""(?<=["'])[A-Za-z0-9_.:-]{4,128}(?=["'])""")

Turn = Sequence[Mapping[str, Any]]
"""Messages or items of one model turn, as in the request. Parsed lazily: histories are long."""


def turns_of(request: RecordedRequest) -> list[Turn] | None:
    """Return the model turns of a request, oldest first; None if unreadable."""
    return None if request.history is None else list(_turns(request.history))


class Conversation(NamedTuple):
    """A request as it is compared with later requests.

    Attributes:
        turns: See `turns_of`.
        messages: Hash of all messages; None if unreadable.
        prefixes: Hashes of the messages before each run of model messages, oldest first. A reply
            to such messages is in the run behind them.
    """

    turns: list[Turn] | None
    messages: int | None
    prefixes: Sequence[int]


def conversation_of(request: RecordedRequest) -> Conversation:
    """Read a request. Hashes ignore `cache_control` and whether content is text or text blocks."""
    items = request.history
    if items is None:
        return Conversation(None, None, ())
    hashed, prefixes, before = hashlib.sha256(b"messages"), list[int](), False
    for item in items:
        is_model = is_model_item(item)
        if is_model and not before:
            prefixes.append(digest_hash(hashed.digest()))
        before = is_model
        _add_sized(hashed, _message(item))
    return Conversation(list(_turns(items)), digest_hash(hashed.digest()), prefixes)


def call_id_of(turn: Turn | None) -> int | None:
    """Return the hash of the last tool call id in a turn; None without one."""
    for item in reversed(turn or ()):
        for call in reversed(calls_of(item)):
            if call.call_id is not None and (letters := _letters(call.call_id)):
                return hash_of(b"call id", letters.encode("utf-8", "surrogatepass"))
    return None


def call_ids_in(turn: Turn) -> list[int]:
    """Return hashes of possible tool call ids in the text of a turn, last first.

    Some agents repeat a call as text: `[{'id': 'call_1', 'type': 'function', ...}]`.
    """
    found = _QUOTED.findall(_text(turn)[-TEXT_SEARCHED:])[::-1]
    return [hash_of(b"call id", _letters(word).encode()) for word in dict.fromkeys(found)][
        :IDS_LOOKED_UP
    ]


def words_of(turn: Turn) -> bytes:
    """Return a sample of the words of a turn and of its pairs of adjacent words, packed.

    The words are those that the model said and those of its calls, without thoughts. The sample has
    the lowest hashes, so two turns with common words have common hashes. Only the beginning and the
    end of a long turn are read.
    """
    parts = [_said(turn).encode("utf-8", "surrogatepass")]
    parts += [_packed(call) for item in turn for call in calls_of(item)]
    said = b" ".join(parts)
    if len(said) > 2 * WORD_BYTES:
        said = said[:WORD_BYTES] + b" " + said[-WORD_BYTES:]
    words = list(map(crc32, _WORDS.findall(said)))
    hashes = set(words).union(map(xor, words, words[1:]))
    return array("H", [hashed >> 16 for hashed in sorted(hashes)[:WORDS]]).tobytes()


def likeness(words: bytes, others: bytes) -> tuple[float, float]:
    """Compare two samples of `words_of`.

    Returns:
        The share of the smaller one that is in both, and that of both together: words that are
        added to a reply, or removed from it, leave the first one at 1.
    """
    first, second = set(array("H", words)), set(array("H", others))
    if len(first) == WORDS or len(second) == WORDS:  # of what only one samples, nothing is known
        last = min(max(one) for one in (first, second) if len(one) == WORDS)
        first, second = ({word for word in one if word <= last} for one in (first, second))
    if not first or not second:
        return 0.0, 0.0
    both = len(first & second)
    return both / min(len(first), len(second)), 2 * both / (len(first) + len(second))


def reply_of(response_json: bytes) -> Turn | None:
    """Return the turn of a recorded reply; None if it is empty."""
    parsed = _loaded(response_json)
    is_list = isinstance(parsed, dict) and isinstance(parsed.get("output"), list)
    items = items_of(parsed)
    turns = list(_turns(items if is_list else [{**item, "role": "assistant"} for item in items]))
    return turns[-1] if turns else None


def last_call_in(turn: Turn) -> bytes | None:
    """Return the last tool call in a turn; None without one."""
    for item in reversed(turn):
        named = [call for call in calls_of(item) if call.call_id or call.name]
        if named:
            return _packed(named[-1])
    return None


def turn_hash(turn: Turn) -> int:
    """Return the hash of text and last call: equal for a reply and for the same turn in a later
    request.
    """
    text, call = _text(turn).encode("utf-8", "surrogatepass"), last_call_in(turn) or b""
    return hash_of(b"turn", len(text).to_bytes(8, "little"), text, call)


def exchange_hash(messages: int | None, turn: Turn | None) -> int | None:
    """Return the hash of a request's messages and the whole reply to it: what the model said,
    without thoughts, and all of its calls. None without one of both.
    """
    if messages is None or turn is None:
        return None
    hashed = hashlib.sha256(messages.to_bytes(8, "little"))
    _add_sized(hashed, _said(turn).encode("utf-8", "surrogatepass"))
    for item in turn:
        for call in calls_of(item):
            _add_sized(hashed, _packed(call))
    return digest_hash(hashed.digest())


class ReplyHashes(NamedTuple):
    """Hash of the last reply in a request's history, and hash of the reply to the request. None:
    empty or unreadable.
    """

    previous: int | None
    reply_hash: int | None


def reply_hashes(turns: Sequence[Turn] | None, reply: Turn | None) -> ReplyHashes:
    """Return the hashes for a request with these model turns, and for the reply to it."""
    last = turns[-1] if turns else None
    previous = _of_call(last_call_in(last)) if last is not None else None
    reply_hash = _of_call(last_call_in(reply)) if reply is not None else None
    if turns is None or (
        (last is None or previous is not None) and (reply is None or reply_hash is not None)
    ):
        return ReplyHashes(previous, reply_hash)
    hashed = hashlib.sha256(b"said")
    for turn in turns:
        _add(hashed, turn)
    if last is not None and previous is None:
        previous = digest_hash(hashed.digest())
    if reply is not None and reply_hash is None:
        _add(hashed, reply)
        reply_hash = digest_hash(hashed.digest())
    return ReplyHashes(previous, reply_hash)


def _of_call(call: bytes | None) -> int | None:
    return hash_of(b"call", call) if call is not None else None


def _add(hashed: hashlib._Hash, turn: Turn) -> None:
    _add_sized(hashed, last_call_in(turn) or _said(turn).encode("utf-8", "surrogatepass"))


def _add_sized(hashed: hashlib._Hash, data: bytes) -> None:
    hashed.update(len(data).to_bytes(8, "little") + data)


def prompt_of(request: RecordedRequest) -> bytes:
    """Return the part of a request that makes its prompt, equal for equal JSON; all of a request
    that has no such part or is unreadable.
    """
    fields = request.fields
    if fields is None or not CONVERSATION_FIELDS & fields.keys():
        return request.body
    return _dumped({name: value for name, value in fields.items() if name in PROMPT_FIELDS})


def _message(item: Any) -> bytes:
    """Return the content of a message, independent of changes of form between calls."""
    if isinstance(item, dict):
        content = item.get("content")
        if isinstance(content, list) and all(
            isinstance(b, dict) and b.get("type") in SAID_BLOCKS for b in content
        ):
            content = "\n".join(texts_of(item))
        elif isinstance(content, list):
            content = [_bare(block) for block in content]
        item = {**_bare(item), "content": content}
    return _dumped(item)


def _bare(block: Any) -> Any:
    return (
        {k: v for k, v in block.items() if k != "cache_control"}
        if isinstance(block, dict)
        else block
    )


def _letters(call_id: str) -> str:
    return "".join(filter(str.isalnum, call_id))


def _loaded(packed: bytes) -> Any:
    try:
        return loaded(packed)
    except ValueError:
        return None


def _turns(items: Sequence[Any]) -> Iterator[Turn]:
    """Yield model turns: adjacent model items form one turn; empty turns are skipped."""
    turn: list[Mapping[str, Any]] = []
    for item in items:
        kind = item.get("type") if isinstance(item, dict) else None
        if isinstance(item, dict) and is_said(item):
            turn.append(item)
        elif kind != "reasoning" and not str(kind).endswith("_call"):
            if any(map(_has_content, turn)):
                yield turn
            turn = []
    if any(map(_has_content, turn)):
        yield turn


def _has_content(item: Mapping[str, Any]) -> bool:
    """Return whether an item has text or a call."""
    content = item.get("content")
    if isinstance(content, str) and content and not content.isspace():
        return True  # as a rule
    return bool(calls_of(item)) or any(not text.isspace() for text in texts_of(item))


def _text(turn: Turn) -> str:
    if len(turn) == 1 and isinstance(content := turn[0].get("content"), str):
        return content.strip()
    return "\n".join(text for item in turn for text in texts_of(item)).strip()


def _said(turn: Turn) -> str:
    """Return the text of a turn without thoughts, which agents drop; whole if it has only them."""
    text = _text(turn)
    return without_thoughts(text).strip() or text


def _packed(call: Call) -> bytes:
    letters, given = _letters(call.call_id or ""), call.given
    if isinstance(given, str):
        given = _loaded(given.encode("utf-8", "surrogatepass")) or given
    return _dumped([letters, call.name, given])


def _dumped(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:
        # orjson writes at most 254 levels, marshal 2,000; marshal does not sort the keys.
        return marshal.dumps(value, MARSHAL_VERSION)
