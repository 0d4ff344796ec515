"""Segment trees: the tokens of a trajectory, each stored once.

The parent of a step is the step whose prompt and response are the longest prefix of its prompt.
The tree has one policy segment per step with sampled tokens. Environment tokens between a
parent's response and the next sampling are below the parent's segment, shared by all steps that
begin with them (a radix tree: a fork splits a segment). A linear conversation is one chain:
environment, policy, environment, policy. Tokens that a client returned differently from how they
were sampled are environment tokens of a new branch. If they encode the same reply, the step is
`realigned` and keeps its source. Lengths are in tokens; ids are packed little-endian int32, 4
bytes each.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from clawstream.schemas.records import Drift, Segment, VersionSpan

TOKEN_BYTES = 4
"""Bytes of a packed token id."""


class SampledTokens(NamedTuple):
    """Tokens of a step. base: position of an earlier step whose tokens precede `prompt`. counts:
    whether it is a branch of the tree; if not, it may still be a base.
    """

    prompt: bytes
    response: bytes
    logprobs: bytes | None = None
    versions: tuple[VersionSpan, ...] = ()
    base: int | None = None
    counts: bool = True


@dataclass(frozen=True, slots=True)
class Node:
    """Position of a step in the tree. parent: of a realigned step, the step whose reply returned in
    other tokens; its segment is below the longest sampled prefix.
    """

    index: int
    parent: int | None
    segment: int | None
    drift: Drift


@dataclass(frozen=True, slots=True)
class Tree:
    """segments: parents precede children. nodes: one per input step, in input order."""

    segments: tuple[Segment, ...]
    nodes: tuple[Node, ...]

    @property
    def environment_tokens(self) -> int:
        """Return the number of tokens that no policy sampled, each counted once."""
        return sum(len(s.token_ids) // TOKEN_BYTES for s in self.segments if s.step_index is None)


@dataclass(slots=True, eq=False)
class _Branch:
    """A segment under construction. environment: environment children by first token. above, end:
    parent, and bytes from the root to its end. Parent links are removed at the end: cycles would
    keep all tokens in memory until the next garbage collection.
    """

    tokens: bytes
    step: int | None = None
    above: _Branch | None = None
    end: int = 0
    environment: dict[bytes, _Branch] = field(default_factory=dict)
    policy: list[_Branch] = field(default_factory=list)
    number: int = -1


RepeatsReply = Callable[[int, int], bool]
"""Return whether the first step's last model turn is the reply of the second step."""


def build(
    steps: Sequence[SampledTokens | None], repeats: RepeatsReply = lambda step, earlier: False
) -> Tree:
    """Build the tree of steps in log order; None for a step without tokens. repeats: called only
    when a prompt diverges.

    Uses the memory of each token once, not of each prompt.
    """
    paths = _paths(steps)
    parents, sources, drifts = _parents(steps, paths, repeats)
    order = _causal_order(parents, sources)
    index = {step: i for i, step in enumerate(order)}
    root = _Branch(b"")
    leaves: dict[int, _Branch] = {}
    for step in order:
        tokens, path = steps[step], paths[step]
        if tokens is None or path is None or not tokens.counts:
            continue
        parent = parents[step]
        above = root if parent is None else leaves[parent]
        leaf = _Branch(tokens.response, step)
        _descend(above, path.behind(_path(paths, parent))).policy.append(leaf)
        leaves[step] = leaf
    segments = _number(root, steps, index)
    nodes = tuple(
        Node(
            index[i],
            index[p] if (p := sources[i]) is not None else None,
            leaves[i].number if i in leaves else None,
            d,
        )
        for i, d in enumerate(drifts)
    )
    return Tree(segments, nodes)


def prompt_of(tree_segments: Sequence[Segment], segment: int) -> bytes:
    """Return the packed prompt of the step whose response is in `segment`."""
    chunks: list[bytes] = []
    at = tree_segments[segment].parent
    while at is not None:
        chunks.append(tree_segments[at].token_ids)
        at = tree_segments[at].parent
    return b"".join(reversed(chunks))


class _Path(NamedTuple):
    """Ends of a step's prompt and response in the radix tree of all tokens."""

    prompt_end: _Branch
    response_end: _Branch

    def behind(self, parent: _Path | None) -> bytes:
        """Return the prompt after the parent's prompt and response."""
        chunks: list[bytes] = []
        at: _Branch | None = self.prompt_end
        while at is not None and (parent is None or at is not parent.response_end):
            chunks.append(at.tokens)
            at = at.above
        return b"".join(reversed(chunks))


def _paths(steps: Sequence[SampledTokens | None]) -> list[_Path | None]:
    """Insert all steps into a radix tree; return the path of each."""
    root = _Branch(b"")
    paths: list[_Path | None] = []
    for step in steps:
        if step is None:
            paths.append(None)
            continue
        base = _path(paths, step.base)
        prompt_end = _descend(root if base is None else base.response_end, step.prompt)
        paths.append(_Path(prompt_end, _descend(prompt_end, step.response)))
    grown = [root]
    while grown:
        branch = grown.pop()
        grown.extend(branch.environment.values())
        branch.environment = {}
    return paths


def _path(paths: Sequence[_Path | None], step: int | None) -> _Path | None:
    if step is None:
        return None
    path = paths[step]
    assert path is not None, f"step {step} has no tokens to go on from"
    return path


def _parents(
    steps: Sequence[SampledTokens | None], paths: Sequence[_Path | None], repeats: RepeatsReply
) -> tuple[list[int | None], list[int | None], list[Drift]]:
    """Return for each step the longest sampled prefix, its source step (different if realigned),
    and its drift.

    Both have shorter prompts than the step, so no step is its own ancestor.
    """
    counting = [
        (i, path)
        for i, (s, path) in enumerate(zip(steps, paths, strict=True))
        if s and path and s.response and s.counts
    ]
    latest = {path.response_end: i for i, path in counting}  # of equal ones the latest
    sampling = {i for i, _ in counting}
    prompt_lengths: dict[
        _Branch, list[int]
    ] = {}  # of the steps before this one on the log, by where they end
    parents: list[int | None] = []
    sources: list[int | None] = []
    drifts: list[Drift] = []
    for i, (step, path) in enumerate(zip(steps, paths, strict=True)):
        parent = source = None
        drift: Drift = "root"
        if step is not None and path is not None and step.counts:
            at: _Branch | None = path.prompt_end
            while at is not None and (parent := latest.get(at)) is None:
                at = at.above
            left = _diverged_from(path.prompt_end, at.end if at is not None else 0, prompt_lengths)
            source = next((other for other in left if repeats(i, other)), None)
            drift = (
                "realigned"
                if source is not None
                else "forked"
                if left
                else "root"
                if parent is None
                else "clean"
            )
            if i in sampling:
                prompt_lengths.setdefault(path.prompt_end, []).append(i)
        parents.append(parent)
        sources.append(parent if source is None else source)
        drifts.append(drift)
    return parents, sources, drifts


def _diverged_from(
    prompt_end: _Branch, begin: int, earlier: Mapping[_Branch, Sequence[int]]
) -> Sequence[int]:
    """Return the steps with the longest prompt from which this prompt diverges, latest first.
    begin: bytes of its longest sampled prefix.
    """
    at = prompt_end.above
    while at is not None and at.end >= max(begin, 1):
        if at in earlier:
            return earlier[at][::-1]
        at = at.above
    return ()


def _causal_order(parents: Sequence[int | None], sources: Sequence[int | None]) -> list[int]:
    """Order steps by parents and sources first, then by log order."""
    children: dict[int, list[int]] = {}
    ready, waits = [], [0] * len(parents)
    for i, both in enumerate(zip(parents, sources, strict=True)):
        above = {step for step in both if step is not None}
        waits[i] = len(above)
        if not above:
            ready.append(i)
        for step in above:
            children.setdefault(step, []).append(i)
    order = []
    while ready:
        i = heapq.heappop(ready)
        order.append(i)
        for child in children.get(i, ()):
            waits[child] -= 1
            if not waits[child]:
                heapq.heappush(ready, child)
    return order


def _descend(above: _Branch, tokens: bytes) -> _Branch:
    """Return the branch at which `tokens`, written by the environment below `above`, end. Adds and
    splits branches.

    A split branch remains the lower half.
    """
    at = 0
    while at < len(tokens):
        first = tokens[at : at + TOKEN_BYTES]
        below = above.environment.get(first)
        if below is None:
            left = tokens[at:]
            below = above.environment[first] = _Branch(left, above=above, end=above.end + len(left))
            return below
        if not tokens.startswith(below.tokens, at):
            shared = _common(below.tokens, tokens[at : at + len(below.tokens)])
            upper = _Branch(below.tokens[:shared], above=above, end=above.end + shared)
            below.tokens, below.above = below.tokens[shared:], upper
            upper.environment[below.tokens[:TOKEN_BYTES]] = below
            above.environment[first] = upper
            below = upper
        at += len(below.tokens)
        above = below
    return above


def _common(a: bytes, b: bytes) -> int:
    """Return the length of the longest common prefix in whole tokens, bytes."""
    low, high = 0, min(len(a), len(b)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if (
            a[low * TOKEN_BYTES : middle * TOKEN_BYTES]
            == b[low * TOKEN_BYTES : middle * TOKEN_BYTES]
        ):
            low = middle
        else:
            high = middle - 1
    return low * TOKEN_BYTES


def _number(
    root: _Branch, steps: Sequence[SampledTokens | None], index: dict[int, int]
) -> tuple[Segment, ...]:
    """Return segments in depth-first order, children in insertion order."""
    segments: list[Segment] = []
    stack: list[tuple[_Branch, int | None]] = [(root, None)]
    while stack:
        branch, parent = stack.pop()
        branch.above = None
        if branch is not root:
            branch.number = len(segments)
            step = steps[branch.step] if branch.step is not None else None
            segments.append(
                Segment(
                    parent=parent,
                    step_index=index[branch.step] if branch.step is not None else None,
                    token_ids=branch.tokens,
                    logprobs=step.logprobs if step else None,
                    versions=step.versions if step else (),
                )
            )
            parent = branch.number
        children = [*branch.policy, *branch.environment.values()]
        stack.extend((child, parent) for child in reversed(children))
    return tuple(segments)
