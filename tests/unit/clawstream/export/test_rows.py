"""Rows of a trajectory: each sampled token is trained in exactly one row."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from hashlib import sha256

import orjson
from hypothesis import given
from hypothesis import strategies as st
from support.export_lake import trajectory, turn

from clawstream.export.row import Origin
from clawstream.export.rows import Counts, chat_rows, token_rows
from clawstream.export.selection import SelectedTrajectory
from clawstream.runtime.blob_store import BlobMissing
from clawstream.schemas.blob_refs import reference
from clawstream.schemas.records import Blob, Step
from clawstream.schemas.tokens import unpack_ids

ORIGIN = Origin(
    run_id="run", trajectory_id="k", group_id="g", round=None, channel="train",
    outcome="completed", reward=1.0, group_reward_mean=0.5, group_reward_std=0.5, group_rewards=2,
    trainable=True, quality=None, tags=(), metadata_json=None,
)  # fmt: skip
TOKENS = st.lists(st.integers(1, 3), min_size=1, max_size=3)


def no_blob(digest: str) -> bytes:
    raise BlobMissing(digest)


def selected(steps: list[Step]) -> SelectedTrajectory:
    made = trajectory("k", steps, 0, "g")
    return SelectedTrajectory(
        origin=ORIGIN, steps=made.steps, untrainable_steps=(),
        recorded={s.step_id: s for s in steps},
    )  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 4), TOKENS, TOKENS), min_size=1, max_size=6))
def test_each_sampled_token_is_trained_once(
    turns: list[tuple[int, list[int], list[int]]],
) -> None:
    paths: list[list[int]] = [[]]
    steps = []
    for number, (earlier, more, response) in enumerate(turns):
        prompt = [*paths[earlier % len(paths)], *more]
        paths.append([*prompt, *response])
        steps.append(turn("k", number, prompt, response))
    counts = Counts()
    rows = list(token_rows(selected(steps), no_blob, counts))
    trained = Counter[int]()
    for row in rows:
        assert row.tokens is not None and row.tokens.mask[-1]
        trained.update(row.tokens.ids[row.tokens.mask].tolist())
        last = next(s for s in steps if s.step_id == row.step_id)
        assert row.tokens.ids.tolist() == [
            *unpack_ids(last.prompt_token_ids or b""), *unpack_ids(last.response_token_ids or b"")
        ]  # fmt: skip
    assert trained == Counter(token for _, _, response in turns for token in response)
    assert not counts.skipped


def test_a_trainable_step_that_is_missing_excludes_the_trajectory() -> None:
    whole = selected([turn("k", 0, [1], [2]), turn("k", 1, [1, 2, 3], [4])])
    counts = Counts()
    partial = replace(whole, recorded={"k~0.0": whole.recorded["k~0.0"]})
    assert not list(token_rows(partial, no_blob, counts))
    assert not list(chat_rows(partial, no_blob, counts))
    assert counts.skipped == {"steps not in the lake": 2}


def test_an_untrainable_trajectory_has_conversations_but_no_sequences() -> None:
    whole = selected([turn("k", 0, [1], [2])])
    excluded = replace(whole, origin=replace(ORIGIN, trainable=False))
    assert not list(token_rows(excluded, no_blob, Counts()))
    assert len(list(chat_rows(excluded, no_blob, Counts()))) == 1


def test_blobs_are_read_and_a_missing_one_costs_only_the_messages() -> None:
    step = turn("k", 0, [1], [2])
    digest = sha256(step.request_json).hexdigest()
    blob = Blob(field="request_json", url="file:///x", sha256=digest, size_bytes=1)
    outside = selected([replace(step, request_json=reference(blob))])
    (row,) = token_rows(outside, {digest: step.request_json}.__getitem__, Counts())
    assert row.chat is not None and row.chat.messages[0]["content"] == "1"
    counts = Counts()
    (row,) = token_rows(outside, no_blob, counts)
    assert row.chat is None and row.tokens is not None
    assert counts.skipped == {"blob of the request or reply is missing": 1}


def test_metadata_may_be_a_blob() -> None:
    whole = selected([turn("k", 0, [1], [2])])
    blob = Blob(field="metadata_json", url="file:///x", sha256="d", size_bytes=1)
    outside = replace(whole, origin=replace(ORIGIN, metadata_json=reference(blob).decode()))
    (row,) = chat_rows(outside, {"d": orjson.dumps({"a": 1})}.__getitem__, Counts())
    assert row.origin.metadata_json == '{"a":1}'
