"""Segment trees: each token is stored once, and each prompt can be rebuilt exactly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from clawstream.schemas.records import VersionSpan
from clawstream.schemas.tokens import pack_ids, pack_logprobs, unpack_ids
from clawstream.stream_jobs.assemble.payload.segment_tree import (
    SampledTokens,
    Tree,
    build,
    prompt_of,
)


def sampled(prompt: list[int], response: list[int]) -> SampledTokens:
    versions = (VersionSpan(version="r/1.0", start=0, end=len(response)),) if response else ()
    return SampledTokens(
        pack_ids(prompt), pack_ids(response), pack_logprobs([-1.0 * i for i in response]), versions
    )


def shape(tree: Tree) -> list[tuple[int | None, int | None, list[int]]]:
    return [(s.parent, s.step_index, unpack_ids(s.token_ids)) for s in tree.segments]


def test_linear_conversation_is_one_chain() -> None:
    tree = build(
        [sampled([1, 2], [3]), sampled([1, 2, 3, 4], [5, 6]), sampled([1, 2, 3, 4, 5, 6, 7], [8])]
    )
    assert shape(tree) == [
        (None, None, [1, 2]), (0, 0, [3]), (1, None, [4]), (2, 1, [5, 6]), (3, None, [7]),
        (4, 2, [8]),
    ]  # fmt: skip
    assert [(n.index, n.parent, n.segment, n.drift) for n in tree.nodes] == [
        (0, None, 1, "root"), (1, 0, 3, "clean"), (2, 1, 5, "clean"),
    ]  # fmt: skip
    assert tree.environment_tokens == 4
    assert tree.segments[3].versions == (VersionSpan(version="r/1.0", start=0, end=2),)


def test_siblings_share_their_prompt_and_keep_their_own_equal_responses() -> None:
    tree = build([sampled([1, 2], [3, 4]), sampled([1, 2], [3, 4]), sampled([1, 2, 3, 4, 9], [5])])
    assert shape(tree) == [
        (None, None, [1, 2]),
        (0, 0, [3, 4]),
        (0, 1, [3, 4]),
        (2, None, [9]),
        (3, 2, [5]),
    ]
    assert [n.drift for n in tree.nodes] == ["root", "root", "clean"]
    assert tree.nodes[2].parent == 1  # the latest of the equal steps


def test_fork_in_the_environment_splits_a_segment() -> None:
    tree = build([sampled([1, 2, 3], [7]), sampled([1, 2, 4], [8])])
    assert shape(tree) == [
        (None, None, [1, 2]),
        (0, None, [3]),
        (1, 0, [7]),
        (0, None, [4]),
        (3, 1, [8]),
    ]
    assert [n.drift for n in tree.nodes] == ["root", "root"]


def test_prompt_that_ends_inside_a_segment_splits_it() -> None:
    tree = build([sampled([1, 2, 3], [7]), sampled([1, 2], [8])])
    assert shape(tree) == [(None, None, [1, 2]), (0, 1, [8]), (0, None, [3]), (2, 0, [7])]


def test_history_that_differs_from_what_was_sampled_is_a_fork() -> None:
    tree = build(
        [sampled([1], [2, 3]), sampled([1, 2, 9, 4], [5]), sampled([1, 2, 9, 4, 5, 6], [7])]
    )
    assert [n.drift for n in tree.nodes] == ["root", "forked", "clean"]
    assert [n.parent for n in tree.nodes] == [None, None, 1]
    assert shape(tree) == [
        (None, None, [1]),
        (0, 0, [2, 3]),
        (0, None, [2, 9, 4]),
        (2, 1, [5]),
        (3, None, [6]),
        (4, 2, [7]),
    ]


def test_history_that_says_the_same_in_other_tokens_is_realigned() -> None:
    """The parent is the step whose reply the history repeats.

    The parent keeps its sampled tokens, and the stored segments do not change.
    """
    steps = [
        sampled([1], [2, 3]),
        sampled([1], [2, 8]),
        sampled([1, 2, 9, 4], [5]),
        sampled([1, 2, 9, 4, 5, 6], [7]),
    ]
    tree = build(steps, lambda step, earlier: (step, earlier) == (2, 0))
    assert [n.drift for n in tree.nodes] == ["root", "root", "realigned", "clean"]
    assert [n.parent for n in tree.nodes] == [None, None, 0, 2], (
        "of two answers to one prompt the one that is repeated"
    )
    assert tree.segments == build(steps).segments


def test_only_the_step_that_a_prompt_left_is_asked_for_its_reply() -> None:
    asked: list[tuple[int, int]] = []

    def repeats(step: int, earlier: int) -> bool:
        asked.append((step, earlier))
        return False

    steps = [
        sampled([1], [2]),
        sampled([1, 2, 3], [4]),
        sampled([1, 2, 3, 5], [6]),
        sampled([1, 2, 3, 4, 7], [8]),
    ]
    assert [n.drift for n in build(steps, repeats).nodes] == ["root", "clean", "forked", "clean"]
    assert asked == [(2, 1)]


def test_a_realigned_step_comes_behind_both_its_prefix_and_its_source() -> None:
    steps = [sampled([1, 2, 3], [4]), sampled([1, 2, 3, 9], [5]), sampled([1], [2])]
    tree = build(steps, lambda step, earlier: True)
    assert [(n.index, n.parent, n.drift) for n in tree.nodes] == [
        (1, 0, "clean"),
        (2, 1, "realigned"),
        (0, None, "root"),
    ]


def test_continuing_one_of_several_choices_is_clean() -> None:
    tree = build([sampled([1], [2]), sampled([1], [3]), sampled([1, 2, 4], [5])])
    assert [n.drift for n in tree.nodes] == ["root", "root", "clean"]
    assert tree.nodes[2].parent == 0


def test_steps_without_tokens_have_a_place_and_no_segment() -> None:
    tree = build([None, sampled([1], [2]), None])
    assert [(n.index, n.parent, n.segment, n.drift) for n in tree.nodes] == [
        (0, None, None, "root"), (1, None, 1, "root"), (2, None, None, "root"),
    ]  # fmt: skip


def test_parents_come_first_even_if_they_came_late() -> None:
    tree = build([sampled([1, 2, 3], [4]), sampled([9], [9]), sampled([1], [2])])
    assert [n.index for n in tree.nodes] == [2, 0, 1]
    assert [n.parent for n in tree.nodes] == [1, None, None]


token = st.integers(0, 2)
fresh = st.tuples(st.lists(token, max_size=4), st.lists(token, max_size=3))


@st.composite
def conversations(draw: st.DrawFn) -> list[SampledTokens | None]:
    """Draw steps in any order on the topic.

    A step starts a new prompt, extends an earlier step, extends a part of an earlier step, or has
    no tokens.
    """
    made: list[tuple[list[int], list[int]]] = []
    for _ in range(draw(st.integers(1, 8))):
        more, response = draw(fresh)
        if made and draw(st.booleans()):
            prompt, said = draw(st.sampled_from(made))
            whole = prompt + said
            more = (
                whole[: draw(st.integers(0, len(whole)))] + more
                if draw(st.booleans())
                else whole + more
            )
        made.append((more, response))
    steps = [None if draw(st.integers(0, 9)) == 0 else sampled(p, r) for p, r in made]
    return draw(st.permutations(steps)) if draw(st.booleans()) else steps


@given(conversations(), st.sampled_from([0, 1, 2]))
def test_tree_gives_everything_back(steps: list[SampledTokens | None], same: int) -> None:
    tree = build(steps, lambda step, earlier: (step + earlier) % 3 < same)
    assert sorted(n.index for n in tree.nodes) == list(range(len(steps)))
    for number, segment in enumerate(tree.segments):
        assert segment.parent is None or segment.parent < number
        assert segment.token_ids or segment.step_index is not None
        if segment.step_index is None:
            assert segment.logprobs is None and segment.versions == ()
    policy = [s.step_index for s in tree.segments if s.step_index is not None]
    assert len(policy) == len(set(policy)) == sum(s is not None for s in steps)
    for step, node in zip(steps, tree.nodes, strict=True):
        assert node.parent is None or node.parent < node.index
        if step is None:
            assert node.segment is None
            continue
        assert node.segment is not None
        leaf = tree.segments[node.segment]
        assert (leaf.step_index, leaf.token_ids, leaf.logprobs) == (
            node.index,
            step.response,
            step.logprobs,
        )
        assert prompt_of(tree.segments, node.segment) == step.prompt


@given(conversations())
def test_parent_is_the_longest_sampled_prefix(steps: list[SampledTokens | None]) -> None:
    tree = build(steps)
    at = {n.index: s for n, s in zip(tree.nodes, steps, strict=True)}
    for step, node in zip(steps, tree.nodes, strict=True):
        if step is None:
            continue
        prefixes = [
            len(other.prompt + other.response)
            for other in steps
            if other is not None
            and other.response
            and step.prompt.startswith(other.prompt + other.response)
        ]
        if node.parent is None:
            assert not prefixes
        else:
            parent = at[node.parent]
            assert parent is not None and len(parent.prompt + parent.response) == max(prefixes)


@given(conversations())
def test_environment_segments_are_shared(steps: list[SampledTokens | None]) -> None:
    """A shared prefix is stored once.

    No two environment segments with the same parent start with the same token.
    """
    tree = build(steps)
    begins = [(s.parent, s.token_ids[:4]) for s in tree.segments if s.step_index is None]
    assert len(begins) == len(set(begins))
