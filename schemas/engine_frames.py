"""The format in which an engine reports the tokens of a call beside its unchanged reply.

The format is the same for every protocol. A request asks for tokens with the header `ASK: 1`. The
reply to *any* such request carries `ASK: 1`, so `GET /version` probes an engine. Every reply
carries `VERSION_START`: the engine's weight version when the request arrived, and `TOKENIZER`: the
fingerprint of its tokenizer (`clawstream.schemas.tokens`), if it has one.

A frame holds what one generation (one prompt given to the engine) has sampled since its last frame.
It is a line of JSON that ends with a newline (here in two lines), then packed numbers:

    {"g": 0, "p": 19, "h": 16, "s": {"temperature": 0.7, "top_p": 1.0},
     "c": [{"i": 0, "n": 12, "l": true, "f": "stop", "v": [["run/3.0", 0, 12]]}]}
    p prompt ids            int32, little endian
    for each choice in "c"  n output ids, int32, little endian;
                            then, with "l", n log-probabilities, float32, little endian

    "g"    index of the generation within the call, in the order of the prompts
    "p"    number of prompt ids that follow; once per generation, else absent
    "h"    prompt tokens from the engine's cache; once per generation, absent: unknown
    "s"    sampling parameters that the engine applied, by the names of `Sampling`; once per
           generation, else absent
    "a"    why this generation has no tokens; else absent
    "r"    why the prompt does not continue the ids of the request; once per generation, else absent
    "c"    choices with news:
      "i"  index of the choice within its generation
      "n"  number of new output ids that follow
      "l"  true: as many log-probabilities follow; absent: the engine has none
      "f"  the engine's finish reason, in the choice's last frame; else absent
      "v"  with "f", weight versions of the whole choice as [version, start, end] (half-open ranges
           of output ids); else absent

Frames follow each other without a gap; choices without news are omitted.

    a plain reply     the reply's own body, then the frames; header `OWN_BODY`: length of the own
                      body in bytes. Without that header (errors, replies that sampled nothing)
                      there are no frames. One frame per generation holds all of it.
    an event stream   comments `: clawstream <base64 of frames>`, each an event that ends with a
                      blank line. Tokens, finish reason and versions come before the event that
                      shows them, or with it, never after it.

Exact continuation: a request with the header `CONTINUE: 1` has `PRIOR_FIELD` as the last field of
its body (`prior_fields`). The engine removes it and samples from these ids and the tokens of the
new turn, or from the rendered prompt, and then reports why ("r").

A reader that finds "a", or no frame with "f" for a choice, has no complete tokens for it. Packing
is that of `clawstream.schemas.tokens`.
"""

from __future__ import annotations

from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from clawstream.schemas.records import Sampling

ASK = "x-clawstream-capture"
OWN_BODY = "x-clawstream-body"
VERSION_START = "x-clawstream-version-start"
TOKENIZER = "x-clawstream-tokenizer"
COMMENT = b": clawstream "
CONTINUE = "x-clawstream-continue"
PRIOR_FIELD = "clawstream_prior"

Span = tuple[str, int, int]
"""Output ids [start, end) were sampled by this weight version: version, start, end."""


class Choice(NamedTuple):
    """New tokens of one choice.

    which: Index of the choice. ids, logprobs: Packed; logprobs is None when the engine has none.
    finish, spans: Set once the choice has ended.
    """

    which: int
    ids: bytes
    logprobs: bytes | None
    finish: str | None = None
    spans: tuple[Span, ...] | None = None


class Frame(NamedTuple):
    """New tokens of one generation.

    prompt_ids (packed), sampling, cached and rendered are sent once. absent: Why there are no
    tokens. rendered: Why the prompt does not continue the ids that the request gave.
    """

    generation: int
    prompt_ids: bytes | None
    choices: tuple[Choice, ...] = ()
    absent: str | None = None
    sampling: Sampling | None = None
    cached: int | None = None
    rendered: str | None = None


class Prior(NamedTuple):
    """The tokens of the turn that a request continues.

    renderer: Family of the chat template, a name of the library `renderers`.
    prompt_ids, sampled_ids: Packed.
    limit: Longest prompt in tokens; None: the engine's own limit.
    tokenizer: Fingerprint of the tokenizer that the ids belong to; None: not known.
    """

    renderer: str
    prompt_ids: bytes
    sampled_ids: bytes
    limit: int | None = None
    tokenizer: str | None = None


def prior_fields(prior: Prior) -> dict[str, Any]:
    """Return the field for the end of a request's body."""
    ids = (b2a_base64(ids, newline=False).decode() for ids in (prior.prompt_ids, prior.sampled_ids))
    return {PRIOR_FIELD: [prior.renderer, *ids, prior.limit, prior.tokenizer]}


def split_prior(body: bytes) -> tuple[bytes, Prior | None]:
    """Remove the field of `prior_fields` from a body; None: it is not at the end of the body."""
    own, found, field = body.rpartition(b',"%b":' % PRIOR_FIELD.encode())
    try:
        if not found:
            raise ValueError(PRIOR_FIELD)
        renderer, prompt, sampled, *rest = orjson.loads(field.removesuffix(b"}"))
        return own + b"}", Prior(renderer, a2b_base64(prompt), a2b_base64(sampled), *rest)
    except (ValueError, TypeError):
        return body, None


def encode(frame: Frame) -> bytes:
    """A frame's bytes.

    Raises:
        ValueError: A choice has another number of log-probabilities than of ids.
    """
    head: dict[str, Any] = {"g": frame.generation}
    arrays = []
    if frame.prompt_ids is not None:
        head["p"] = len(frame.prompt_ids) // 4
        arrays.append(frame.prompt_ids)
    if frame.absent is not None:
        head["a"] = frame.absent
    if frame.sampling is not None:
        head["s"] = _plain_sampling(frame.sampling)
    if frame.cached is not None:
        head["h"] = frame.cached
    if frame.rendered is not None:
        head["r"] = frame.rendered
    entries = []
    for which, ids, logprobs, finish, spans in frame.choices:
        choice: dict[str, Any] = {"i": which, "n": len(ids) // 4}
        arrays.append(ids)
        if logprobs is not None:
            if len(logprobs) != len(ids):
                raise ValueError(
                    f"choice {which}: {len(logprobs)} bytes of log-probabilities, {len(ids)} of ids"
                )
            choice["l"] = True
            arrays.append(logprobs)
        if finish is not None:
            choice["f"] = finish
        if spans is not None:
            choice["v"] = spans
        entries.append(choice)
    head["c"] = entries
    return b"".join((orjson.dumps(head), b"\n", *arrays))


def decode(data: bytes) -> list[Frame]:
    """All frames of some bytes. Raises ValueError when they are not whole frames."""
    frames = []
    at, end = 0, len(data)
    try:
        while at < end:
            frame, at = _frame(data, at)
            frames.append(frame)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"capture frame: malformed head: {error!r}") from error
    if at != end:
        raise ValueError(f"capture frame: {at - end} bytes are missing at the end")
    return frames


def _frame(data: bytes, at: int) -> tuple[Frame, int]:
    """Return the frame at an offset, and the offset behind it."""
    line = data.index(b"\n", at)
    head = orjson.loads(data[at:line])
    at = line + 1
    prompt = None
    if (count := head.get("p")) is not None:
        prompt, at = data[at : at + 4 * count], at + 4 * count
    choices = []
    for entry in head["c"]:
        which, size = entry["i"], 4 * entry["n"]
        if type(which) is not int or type(size) is not int or which < 0 or size < 0:
            raise ValueError(f"capture frame: choice {which!r:.20} with {size!r:.20} bytes of ids")
        ids, at = data[at : at + size], at + size
        logprobs = None
        if "l" in entry:
            logprobs, at = data[at : at + size], at + size
        spans = entry.get("v")
        told = spans if spans is None else _spans(spans)
        choices.append(Choice(which, ids, logprobs, entry.get("f"), told))
    sampling, cached, rendered = head.get("s"), head.get("h"), head.get("r")
    if cached is not None and (type(cached) is not int or not 0 <= cached < 1 << 31):
        raise ValueError(f"capture frame: {cached!r:.20} cached tokens")
    if rendered is not None and (type(rendered) is not str or len(rendered) > MAX_WORD):
        raise ValueError(f"capture frame: rendered because {rendered!r:.20}")
    how = sampling if sampling is None else _sampling(sampling)
    return Frame(head["g"], prompt, tuple(choices), head.get("a"), how, cached, rendered), at


def _spans(spans: Sequence[Any]) -> tuple[Span, ...]:
    return tuple((version, start, end) for version, start, end in spans)


_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
MAX_CONSTRAINTS, MAX_WORD = 32, 100


def _plain_sampling(how: Sampling) -> dict[str, Any]:
    plain = {
        name: value
        for name in (*_NUMBERS, "top_k", "logprobs_mode")
        if (value := getattr(how, name)) is not None
    }
    return {**plain, "constraints": how.constraints} if how.constraints else plain


def _sampling(fields: Mapping[str, Any]) -> Sampling:
    """Parse sampling parameters; ignores unknown fields of newer engines.

    Raises:
        ValueError: A value has a wrong type.
    """
    numbers = {name: fields[name] for name in _NUMBERS if fields.get(name) is not None}
    top_k, mode, constraints = (
        fields.get("top_k"),
        fields.get("logprobs_mode"),
        fields.get("constraints", []),
    )
    words = [w for w in (mode, *constraints) if w is not None]
    if (
        any(type(value) not in (int, float) for value in numbers.values())
        or not (top_k is None or (type(top_k) is int and 0 <= top_k < 1 << 31))
        or any(type(word) is not str or len(word) > MAX_WORD for word in words)
        or len(constraints) > MAX_CONSTRAINTS
    ):
        raise ValueError(f"capture frame: sampling parameters {fields!r:.200}")
    return Sampling(
        source="engine", **{name: float(value) for name, value in numbers.items()},
        top_k=top_k, logprobs_mode=mode, constraints=tuple(constraints),
    )  # fmt: skip


def comment(frames: bytes) -> bytes:
    """Encoded frames as an event of a stream, with its blank line."""
    return b"".join((COMMENT, b2a_base64(frames, newline=False), b"\n\n"))


def is_comment(event: bytes) -> bool:
    """Whether an event of a stream is ours."""
    return event.startswith(COMMENT)


def read_comment(event: bytes) -> list[Frame]:
    """Frames of an event for which `is_comment` holds. Raises ValueError."""
    return decode(a2b_base64(event[len(COMMENT) :]))


def trail(body: bytes, frames: Iterable[bytes]) -> bytes:
    """Append encoded frames to a plain body; the header `OWN_BODY` must be `len(body)`."""
    return b"".join((body, *frames))


def split(body: bytes, own: str) -> tuple[bytes, list[Frame]]:
    """Split a plain reply into its own body and its frames. own: Value of the header `OWN_BODY`.

    Raises:
        ValueError: The length or the frames are malformed.
    """
    length = int(own)
    if not 0 <= length <= len(body):
        raise ValueError(f"{OWN_BODY}: {own}, but the reply has {len(body)} bytes")
    return body[:length], decode(body[length:])
