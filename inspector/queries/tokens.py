"""The sampled tokens of a step, each with a class for its colour. Pure but for the queries."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from math import exp, isnan
from typing import Any, Literal, NamedTuple, get_args

from clawstream.inspector.queries.lake import Lake, Row
from clawstream.inspector.queries.trajectory import Trajectory, counting, log_times, recorded

Pieces = Callable[[str | None, Sequence[int]], list[str] | None]
"""Texts of token ids of a weight version; None: there is no tokenizer for it."""
Mode = Literal["logprob", "entropy", "difference", "mask", "version"]
MODES: tuple[Mode, ...] = get_args(Mode)
PAGE = 2000
"""Tokens on one page."""
WINDOW = 9
"""Tokens whose mean surprisal estimates the entropy at the middle one."""
_BOUNDS = (0.05, 0.2, 0.5, 1.0, 1.6, 2.3, 3.5, 5.0)
"""Surprisal in nats at which the colour changes: classes 0 to 8."""
_DIFFERENCES = (0.01, 0.05, 0.2, 1.0)
"""Difference of engine and trainer in nats at which the colour changes: classes 0 to 4."""
_BEFORE, _AFTER = "INTERVAL 2 MINUTE", "INTERVAL 1 MINUTE"
"""Maximum time between the log times of a version and of its tokens: the time-out of their
transaction, and the difference of clocks."""
_COLUMNS = """step_id, prompt_token_ids, response_token_ids, response_logprobs, versions,
    version_first, version_last, redacted_response, tokens_absent_reason, sampling,
    tokenizer_fingerprint"""


class Token(NamedTuple):
    """A sampled token. position: from 0. css: class of its colour. title: what is known."""

    position: int
    text: str
    css: str
    title: str


def step_of(lake: Lake, run_id: str, step: Row) -> Row | None:
    """Return the token columns of a step of `trajectory.find`."""
    found = recorded(lake, run_id, [log_times([step])], [step["step_id"]], _COLUMNS)
    return found[0] if found else None


def trained_of(lake: Lake, found: Trajectory, step: Row) -> Row | None:
    """Return what the trainer recorded of a step, and of which version; None: nothing.

    Of several versions that were trained on it, the surviving one counts.
    """
    version = counting(found.versions)
    if version is None:
        return None
    rows = lake.rows(
        f"""SELECT updates, logprobs, advantages FROM trained_tokens_raw
        WHERE run_id = $run AND step_id = $step AND version_id = $version
            AND kafka_timestamp BETWEEN timezone('UTC', $at::TIMESTAMP) - {_BEFORE}
                AND timezone('UTC', $at::TIMESTAMP) + {_AFTER}""",
        {
            "run": found.head["run_id"], "step": step["step_id"],
            "version": version["version_id"], "at": version["published_at"],
        },
    )  # fmt: skip
    return version | rows[0] if rows else None


def tokens_of(
    step: Row,
    mode: str,
    mask_reason: str | None,
    pieces: Pieces,
    first: int = 0,
    trained: Row | None = None,
) -> list[Token]:
    """Return a page of the sampled tokens of a step.

    Args:
        step: of `step_of`.
        mode: one of MODES, what the colours show.
        mask_reason: why the step is not trained; None: it is.
        first: index of the first token.
        trained: of `trained_of`; its mask is the one that counts.
    """
    ids = step["response_token_ids"] or []
    logprobs = step["response_logprobs"] or [None] * len(ids)
    masked = redacted(step, len(ids))
    trainer = _known((trained or {}).get("logprobs"), len(ids))
    advantages = _known((trained or {}).get("advantages"), len(ids))
    versions = version_of_tokens(step, len(ids))
    names = sorted({v for v in versions if v is not None})
    smooth = smoothed([None if m else p for p, m in zip(logprobs, masked, strict=True)])
    end = min(first + PAGE, len(ids))
    known = versions[first] if first < end else None
    texts = pieces(known, ids[first:end]) or [f"{i} " for i in ids[first:end]]
    out = []
    for i, text in zip(range(first, end), texts, strict=True):
        p, q = logprobs[i], trainer[i]
        why = "redacted" if masked[i] else mask_reason
        if trained is not None:
            why = None if advantages[i] is not None else why or "the trainer left it out"
        css = {
            "logprob": _shade(None if p is None else -p),
            "entropy": _shade(smooth[i]),
            "difference": _diverging(None if p is None or q is None else p - q),
            "mask": "m0" if why or p is None else "m1",
            "version": f"v{names.index(str(versions[i])) % 6}" if versions[i] else "none",
        }[mode]
        facts = _title(i, ids[i], p, smooth[i], versions[i], why, q, advantages[i])
        out.append(Token(i, text, css, facts))
    return out


def _known(values: Sequence[float] | None, length: int) -> Sequence[float | None]:
    """Return the values of trained tokens; None for the others."""
    return [None if isnan(v) else v for v in values] if values is not None else [None] * length


def _shade(nats: float | None) -> str:
    return "none" if nats is None else f"q{bisect_right(_BOUNDS, nats)}"


def _diverging(nats: float | None) -> str:
    """Return the class of a difference: `d0`, else `dp` or `dn` with a number for its size."""
    size = 0 if nats is None else bisect_right(_DIFFERENCES, abs(nats))
    if nats is None or not size:
        return "none" if nats is None else "d0"
    return f"{'dp' if nats > 0 else 'dn'}{size}"


def _title(
    i: int,
    token: int,
    p: float | None,
    entropy: float | None,
    version: str | None,
    why: str | None,
    trainer: float | None,
    advantage: float | None,
) -> str:
    parts = [f"token {i}", f"id {token}"]
    if p is not None:
        parts.append(f"log p {p:.4f} (p {exp(p):.3f})")
    if p is not None and trainer is not None:
        parts.append(f"trainer {trainer:.4f}, difference {p - trainer:.2g}")
        parts.append(f"ratio {exp(min(trainer - p, 700.0)):.4g}")
    if advantage is not None:
        parts.append(f"advantage {advantage:.3g}")
    if entropy is not None:
        parts.append(f"entropy about {entropy:.2f} nats")
    parts.append(version or "version not known")
    parts.append(f"mask 0: {why}" if why else "mask 1")
    return " · ".join(parts)


def redacted(step: Row, length: int) -> list[bool]:
    """Return which tokens were replaced: their mask is 0."""
    spans = step["redacted_response"] or ()
    return [any(s["start"] <= i < s["end"] for s in spans) for i in range(length)]


def version_of_tokens(step: Row, length: int) -> list[str | None]:
    """Return the weight version of each token: by the engine's spans, else by its two labels."""
    first, last = step["version_first"], step["version_last"]
    out: list[Any] = [first if first == last else None] * length
    for span in step["versions"] or ():
        out[span["start"] : span["end"]] = [span["version"]] * (span["end"] - span["start"])
    return out


def smoothed(logprobs: Sequence[float | None]) -> list[float | None]:
    """Estimate the entropy at each token, in nats: the mean surprisal of its neighbourhood.

    The surprisal of a sampled token is an unbiased estimate of the entropy of its distribution;
    the mean over a window has less variance. Tokens without a log-probability do not count.
    """
    half = WINDOW // 2
    return [
        None if p is None else _mean_surprisal(logprobs[max(0, i - half) : i + half + 1])
        for i, p in enumerate(logprobs)
    ]


def _mean_surprisal(logprobs: Iterable[float | None]) -> float:
    known = [-p for p in logprobs if p is not None]
    return sum(known) / len(known)
