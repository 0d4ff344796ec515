"""Segment trees: the tokens of a trajectory, each stored once.

A step's prompt usually starts with the prompt and response of an earlier step. Its parent is the step whose prompt and response are
the longest prefix of its prompt. The tree has one policy segment for each step that sampled something; what the environment wrote
between a parent's response and the next sampling hangs below the parent's segment, shared by all steps that begin with it (a radix
tree: a fork splits a segment). So a linear conversation is one chain environment, policy, environment, policy. Tokens that a client
sent back *differently* from how they were sampled are the environment's in the new branch. Where they say the same in other tokens, that
is where the step comes from all the same: realigned, and no fork. All lengths are in tokens; ids are packed
little-endian int32, 4 bytes each.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from schemas.events import Drift, Segment, VersionSpan

WIDTH = 4
"""Bytes of a packed token id."""


class Sampled(NamedTuple):
    """One step's tokens. prompt, response: packed ids; logprobs: packed, as many as response ids, None when not known."""

    prompt: bytes
    response: bytes
    logprobs: bytes | None = None
    versions: tuple[VersionSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class Node:
    """Where a step is: its position, its parent's position, the segment with its response, and how its prompt came about.

    parent: of a realigned step the one whose reply came back in other tokens; its segment hangs below the longest sampled prefix.
    """

    index: int
    parent: int | None
    segment: int | None
    drift: Drift


@dataclass(frozen=True, slots=True)
class Tree:
    """segments: a parent comes before its children. nodes: one for each input step, in input order."""

    segments: tuple[Segment, ...]
    nodes: tuple[Node, ...]

    @property
    def environment_tokens(self) -> int:
        """Tokens that no policy sampled, each counted once."""
        return sum(len(s.token_ids) // WIDTH for s in self.segments if s.step_index is None)


@dataclass(slots=True, eq=False)
class _Branch:
    """A segment while the tree grows. `environment`: children written by the environment, by their first token."""

    tokens: bytes
    step: int | None = None
    environment: dict[bytes, _Branch] = field(default_factory=dict)
    policy: list[_Branch] = field(default_factory=list)
    number: int = -1


Repeats = Callable[[int, int], bool]
"""Whether the request of the first step has the reply of the second one as the model's last turn."""


def build(steps: Sequence[Sampled | None], repeats: Repeats = lambda step, earlier: False) -> Tree:
    """The tree of steps in log order; None for a step whose tokens are not known. repeats: asked of few, where a prompt has drifted."""
    parents, sources, drifts = _parents(steps, repeats)
    order = _causal_order(parents, sources)
    index = {step: i for i, step in enumerate(order)}
    root = _Branch(b"")
    leaves: dict[int, _Branch] = {}
    for step in order:
        tokens = steps[step]
        if tokens is None:
            continue
        parent = parents[step]
        above = root if parent is None else leaves[parent]
        begin = 0 if parent is None else len(_whole(steps[parent]))
        leaf = _Branch(tokens.response, step)
        _descend(above, tokens.prompt[begin:]).policy.append(leaf)
        leaves[step] = leaf
    segments = _number(root, steps, index)
    nodes = tuple(
        Node(
            index[i], index[p] if (p := sources[i]) is not None else None, leaves[i].number if i in leaves else None, d
        )
        for i, d in enumerate(drifts)
    )
    return Tree(segments, nodes)


def prompt_of(tree_segments: Sequence[Segment], segment: int) -> bytes:
    """The packed prompt of the step whose response is in `segment`: the path from the root to its parent."""
    pieces: list[bytes] = []
    at = tree_segments[segment].parent
    while at is not None:
        pieces.append(tree_segments[at].token_ids)
        at = tree_segments[at].parent
    return b"".join(reversed(pieces))


def _whole(step: Sampled | None) -> bytes:
    assert step is not None
    return step.prompt + step.response


def _parents(
    steps: Sequence[Sampled | None], repeats: Repeats
) -> tuple[list[int | None], list[int | None], list[Drift]]:
    """Of each step the longest sampled prefix, the step it comes from (another one when it is realigned), and its drift.

    Both have shorter prompts than the step, so none is its own ancestor: what has sampled nothing is no prefix.
    """
    whole = {i: s.prompt + s.response for i, s in enumerate(steps) if s is not None and s.response}
    ends = sorted((len(w), i) for i, w in whole.items())
    prompts: list[tuple[int, int]] = []  # (length, step) of the steps before this one on the log
    parents: list[int | None] = []
    sources: list[int | None] = []
    drifts: list[Drift] = []
    for i, step in enumerate(steps):
        parent = source = None
        drift: Drift = "root"
        if step is not None:
            for at in range(bisect_right(ends, (len(step.prompt), len(steps))) - 1, -1, -1):
                if step.prompt.startswith(whole[ends[at][1]]):
                    parent = ends[at][1]
                    break
            begin = len(whole[parent]) if parent is not None else 0
            left = _left(steps, step.prompt, begin, prompts)
            source = next((other for other in left if repeats(i, other)), None)
            drift = "realigned" if source is not None else "forked" if left else "clean" if begin else "root"
            if step.response:
                insort(prompts, (len(step.prompt), i))
        parents.append(parent)
        sources.append(parent if source is None else source)
        drifts.append(drift)
    return parents, sources, drifts


def _left(steps: Sequence[Sampled | None], prompt: bytes, begin: int, earlier: Sequence[tuple[int, int]]) -> list[int]:
    """The steps with the longest prompt from which this one goes on with something else than what was sampled there; latest first."""
    found: list[int] = []
    longest = max(begin, 1)
    for at in range(bisect_right(earlier, (len(prompt), -1)) - 1, -1, -1):
        length, i = earlier[at]
        if length < longest:
            break
        other = steps[i]
        if other is not None and prompt.startswith(other.prompt):
            found.append(i)
            longest = length
    return found


def _causal_order(parents: Sequence[int | None], sources: Sequence[int | None]) -> list[int]:
    """Parents and sources before children, else log order."""
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
    """The branch at which `tokens`, written by the environment below `above`, end. Adds and splits what is needed."""
    while tokens:
        below = above.environment.get(tokens[:WIDTH])
        if below is None:
            below = above.environment[tokens[:WIDTH]] = _Branch(tokens)
            return below
        shared = _common(below.tokens, tokens)
        if shared < len(below.tokens):
            upper = _Branch(below.tokens[:shared])
            below.tokens = below.tokens[shared:]
            upper.environment[below.tokens[:WIDTH]] = below
            above.environment[upper.tokens[:WIDTH]] = upper
            below = upper
        above, tokens = below, tokens[shared:]
    return above


def _common(a: bytes, b: bytes) -> int:
    """Length in bytes of the longest common prefix, in whole tokens."""
    low, high = 0, min(len(a), len(b)) // WIDTH
    while low < high:
        middle = (low + high + 1) // 2
        if a[low * WIDTH : middle * WIDTH] == b[low * WIDTH : middle * WIDTH]:
            low = middle
        else:
            high = middle - 1
    return low * WIDTH


def _number(root: _Branch, steps: Sequence[Sampled | None], index: dict[int, int]) -> tuple[Segment, ...]:
    """Segments in depth-first order, children in the order in which they were added."""
    segments: list[Segment] = []
    stack: list[tuple[_Branch, int | None]] = [(root, None)]
    while stack:
        branch, parent = stack.pop()
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
