"""Segment trees: the tokens of a trajectory, each stored once.

A step's prompt usually starts with the prompt and response of an earlier step. Its parent is the step whose prompt and response are
the longest prefix of its prompt. The tree has one policy segment for each step that sampled something; what the environment wrote
between a parent's response and the next sampling hangs below the parent's segment, shared by all steps that begin with it (a radix
tree: a fork splits a segment). So a linear conversation is one chain environment, policy, environment, policy. Tokens that a client
sent back *differently* from how they were sampled are the environment's in the new branch. All lengths are in tokens; ids are packed
little-endian int32, 4 bytes each.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections.abc import Sequence
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
    """Where a step is: its position, its parent's position, the segment with its response, and how its prompt came about."""

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


def build(steps: Sequence[Sampled | None]) -> Tree:
    """The tree of steps in log order; None for a step whose tokens are not known."""
    parents, drifts = _parents(steps)
    order = _causal_order(parents)
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
            index[i], index[p] if (p := parents[i]) is not None else None, leaves[i].number if i in leaves else None, d
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


def _parents(steps: Sequence[Sampled | None]) -> tuple[list[int | None], list[Drift]]:
    """Parent and drift of each step. Nothing sampled, no parent: so no two steps can be each other's parent."""
    whole = {i: s.prompt + s.response for i, s in enumerate(steps) if s is not None and s.response}
    ends = sorted((len(w), i) for i, w in whole.items())
    prompts: list[tuple[int, int]] = []  # (length, step) of the steps before this one on the log
    parents: list[int | None] = []
    drifts: list[Drift] = []
    for i, step in enumerate(steps):
        parent = None
        if step is None:
            parents.append(None)
            drifts.append("root")
            continue
        for at in range(bisect_right(ends, (len(step.prompt), len(steps))) - 1, -1, -1):
            if step.prompt.startswith(whole[ends[at][1]]):
                parent = ends[at][1]
                break
        begin = len(whole[parent]) if parent is not None else 0
        parents.append(parent)
        drifts.append("forked" if _left_the_path(steps, step.prompt, begin, prompts) else "clean" if begin else "root")
        if step.response:
            insort(prompts, (len(step.prompt), i))
    return parents, drifts


def _left_the_path(
    steps: Sequence[Sampled | None], prompt: bytes, begin: int, earlier: Sequence[tuple[int, int]]
) -> bool:
    """Whether the prompt goes on from an earlier step's prompt with something else than what was sampled there."""
    for at in range(bisect_right(earlier, (len(prompt), -1)) - 1, -1, -1):
        length, i = earlier[at]
        if length < begin or length == 0:
            return False
        other = steps[i]
        if other is not None and prompt.startswith(other.prompt):
            return True
    return False


def _causal_order(parents: Sequence[int | None]) -> list[int]:
    """Parents before children, else log order."""
    children: dict[int, list[int]] = {}
    ready = []
    for i, parent in enumerate(parents):
        if parent is None:
            ready.append(i)
        else:
            children.setdefault(parent, []).append(i)
    heapq.heapify(ready)
    order = []
    while ready:
        i = heapq.heappop(ready)
        order.append(i)
        for child in children.get(i, ()):
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
