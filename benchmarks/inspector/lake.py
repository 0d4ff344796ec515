"""The lake of `benchmarks.inspector`: closed trajectories of agents with a tool, in four runs.

The rows are written by the lake's own writer and merged by its maintenance. A trajectory closes
each half second of log time. Words of the texts follow Zipf's law, as those of a language do.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.jobs.load import GROUP_SIZE, Texts
from clawstream.schemas import records
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.lake.delta.maintenance import maintain
from clawstream.stream_jobs.lake.tables.catalog import catalog
from clawstream.stream_jobs.lake.tables.table import ConsumedRecord
from clawstream.stream_jobs.lake.writer import Lake

RUNS = 4
AT_ONCE = 4000
"""Trajectories of one commit: as many steps as the lake writer flushes at once."""
GROUPS_PER_BATCH = 8
APART_MS = 500
BEGAN_MS = 1_780_000_000_000
VOCABULARY = 50_000
PROMPT = "You are an agent that solves tasks of a shop. Use the tools and answer in one sentence. "
COMMON, RARE, ABSENT = "agent", "needle", "haystack"
"""A word of each trajectory, one of a trajectory in 20,000, and one of none."""
RARE_EACH = 20_000
LONG_TURNS = 40
"""Turns of trajectory 0; others have one to three."""


def run_of(number: int) -> str:
    """Return the run of a trajectory: groups of the runs alternate."""
    return f"run-{number // GROUP_SIZE % RUNS}"


def key_of(number: int) -> str:
    """Return the key and id of a trajectory."""
    return f"{group_of(number)}-{number % GROUP_SIZE}"


def group_of(number: int) -> str:
    """Return the group of a trajectory."""
    return f"task{number // GROUP_SIZE // RUNS % 97}-g{number // GROUP_SIZE}"


def lake_of(directory: Path, trajectories: int) -> Settings:
    """Return the settings of a lake with so many trajectories; writes it if it is not there."""
    where = directory / f"inspector-with-trained-tokens-{trajectories}"
    settings = Settings(data_dir=where)
    if not (where / "complete").exists():
        shutil.rmtree(where, ignore_errors=True)
        _write(settings, trajectories)
        (where / "complete").touch()
    return settings


def _write(settings: Settings, trajectories: int) -> None:
    lake = Lake(settings.lake_uri, {}, window_size=1000)
    lake.acquire()
    offsets: dict[str, int] = {}

    def put(table: str, topic: str, made: Sequence[tuple[int, Any]]) -> None:
        first = offsets.get(topic, 0)
        placed = [
            ConsumedRecord(topic, 0, first + i, at, {}, event) for i, (at, event) in enumerate(made)
        ]
        offsets[topic] = first + len(placed)
        rows = [row for p in placed for row in catalog()[table].rows_of(p)]
        lake.append(table, rows, {(topic, 0): offsets[topic]}, reject=lambda *_: None)

    words = _Words()
    for first in range(0, trajectories, AT_ONCE):
        numbers = range(first, min(first + AT_ONCE, trajectories))
        made = [_trajectory(number, words) for number in numbers]
        steps = [(at, step) for number, (found, _, _) in zip(numbers, made, strict=True)
                 for at, step in _in_time(number, found)]  # fmt: skip
        put("steps", "SS", steps)
        put(
            "trajectories",
            "TT",
            [(_closed_ms(n), m[1]) for n, m in zip(numbers, made, strict=True)],
        )
        put("candidates", "CC", [(_closed_ms(n), m[2]) for n, m in zip(numbers, made, strict=True)])
        for run in range(RUNS):
            name = f"run-{run}"
            mine = [m[2] for m in made if m[2].run_id == name]
            decided = list(_decisions(name, mine, numbers[-1]))
            put("groups", f"B{run}", decided)
            put("trained_tokens", "NN", list(_trained(decided, made)))
            put("trained_trajectories", "NT", list(_trained_trajectories(decided, made)))
            put("weights", "WW", [_version(name, f"B{run}", numbers[-1])])
    list(maintain(settings))


def _closed_ms(number: int) -> int:
    return BEGAN_MS + number * APART_MS


def _in_time(number: int, steps: Sequence[records.Step]) -> Iterator[tuple[int, records.Step]]:
    """Yield steps with their log times: two seconds apart before the trajectory closes."""
    for left, step in enumerate(reversed(steps)):
        yield _closed_ms(number) - 500 - 2000 * left, step


class _Words:
    """Random text: a few words are frequent, most are rare."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
        picked = self._random.integers(0, len(syllables), (VOCABULARY, 4))
        lengths = self._random.integers(1, 5, VOCABULARY)
        self._words = [
            "".join(syllables[s] for s in row[:n])
            for row, n in zip(picked, lengths, strict=True)
        ]  # fmt: skip

    def text(self, count: int) -> str:
        ranks = np.exp(self._random.random(count) * np.log(VOCABULARY)).astype(int) - 1
        return " ".join(self._words[rank] for rank in ranks)


def _trajectory(
    number: int, words: _Words
) -> tuple[list[records.Step], records.Trajectory, records.Candidate]:
    turns = LONG_TURNS if number == 0 else 1 + number % 3
    run, key, sync = run_of(number), key_of(number), number // 2000
    closed = _closed_ms(number)
    texts = Texts(number)
    rare = f" The {RARE} is here." if number % RARE_EACH == RARE_EACH // 2 else ""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": PROMPT + words.text(40)},
        {"role": "user", "content": f"Order {number}: {words.text(60)}.{rare}"},
    ]
    steps: list[records.Step] = []
    prompt = texts.ids(200)
    for turn in range(turns):
        call = {
            "id": f"call-{number}-{turn}", "type": "function",
            "function": {"name": "search", "arguments": json.dumps({"query": words.text(4)})},
        }  # fmt: skip
        last = turn == turns - 1
        reply: dict[str, Any] = {"role": "assistant", "content": words.text(40)}
        if not last:
            reply["tool_calls"] = [call]
        request = {"model": "policy", "messages": messages, "tools": [_TOOL], "temperature": 1.0}
        sampled, at = texts.ids(64), 1000 * (closed - 500 - 2000 * (turns - turn))
        steps.append(
            records.Step(
                step_id=f"{key}~{turn}.0", run_id=run, trajectory_key=key,
                group_id=group_of(number), call_id=f"{key}~{turn}", choice_index=0,
                protocol="openai.chat", model="policy", status="ok", streamed=False,
                finish_reason="stop" if last else "tool_calls",
                request_json=json.dumps(request).encode(),
                response_json=json.dumps(reply).encode(),
                prompt_token_ids=prompt, response_token_ids=sampled,
                response_logprobs=texts.logprobs(64), version_first=f"{run}/{sync}.0",
                version_last=f"{run}/{sync}.0", user_agent=f"agent-{number % 5}/1.0",
                gateway_id="g", received_at=at, finished_at=at + 1_500_000,
            )
        )  # fmt: skip
        prompt += sampled + texts.ids(60)
        messages = [
            *messages, reply,
            {"role": "tool", "tool_call_id": call["id"], "content": words.text(60)},
        ]  # fmt: skip
    return steps, *_closing(number, steps, sync, closed)


_TOOL = {
    "type": "function",
    "function": {
        "name": "search", "description": "Find products by words.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}  # fmt: skip


def _closing(
    number: int, steps: Sequence[records.Step], sync: int, closed: int
) -> tuple[records.Trajectory, records.Candidate]:
    common: dict[str, Any] = {
        "run_id": run_of(number), "trajectory_key": key_of(number), "group_size": GROUP_SIZE,
        "trajectory_id": key_of(number), "group_id": group_of(number), "round": 0,
        "channel": "val" if number // GROUP_SIZE % 40 == 0 else "train",
        "outcome": "failed" if number % 11 == 0 else "completed",
        "opened_at": steps[0].received_at // 1000, "closed_at": closed,
    }  # fmt: skip
    lengths = [len(s.response_token_ids or b"") // 4 for s in steps]
    payload = records.Trajectory(
        **common, part=0, parts=1, segments=(),
        metadata_json=json.dumps({"task": number % 500, "gold": "7"}).encode(),
        steps=tuple(
            records.TrajectoryStep(
                step_id=s.step_id, index=i, parent=i - 1 if i else None, status="ok",
                drift="clean" if i else "root", prompt_tokens=len(s.prompt_token_ids or b"") // 4,
                response_tokens=n, response_json=s.response_json, trainable=True, offset=i,
            )
            for i, (s, n) in enumerate(zip(steps, lengths, strict=True))
        ),
    )  # fmt: skip
    reward = records.RewardValue(
        source="env", name="score", function_version="1", value=number % 9 / 8, reward_revision=0
    )
    candidate = records.Candidate(
        **common, revision=0, rewards=(reward,), prompt_tokens=200, trainable_tokens=sum(lengths),
        oldest_sync_index=sync, newest_sync_index=sync, trainable=True,
        quality=number % 21 / 20, tags=("checked",) if number % 50 == 0 else (),
        steps=tuple(
            records.CandidateStep(
                step_id=s.step_id, index=i, response_tokens=n, trainable=True,
                oldest_sync_index=sync,
            )
            for i, (s, n) in enumerate(zip(steps, lengths, strict=True))
        ),
    )  # fmt: skip
    return payload, candidate


def _decisions(
    run: str, candidates: Sequence[records.Candidate], number: int
) -> Iterator[tuple[int, Any]]:
    """Yield what admission said of a run's whole groups: one in eight is refused."""
    groups: dict[str, list[records.Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(str(candidate.group_id), []).append(candidate)
    refused = [g for i, g in enumerate(groups) if i % 8 == 7]
    admitted = (
        records.BatchGroup(
            group_id=g, round=0, n=GROUP_SIZE, members=tuple(_member(c) for c in groups[g])
        )
        for g in groups if g not in refused
    )  # fmt: skip
    at = _closed_ms(number)
    while taken := tuple(islice(admitted, GROUPS_PER_BATCH)):
        yield at, records.ReadyBatch(
            run_id=run, channel="train", batch_seq=number, policy_version=1, sync_every=1,
            groups=taken, algorithm="grpo", reward_weights={}, input_topic_id="CC",
            input_partition=0, input_from=0, input_to=1, content_hash="h",
            trainable_tokens=1, created_at_event_time=1,
        )  # fmt: skip
    for g in refused:
        yield at, records.Refused(
            run_id=run, channel="train", group_id=g, round=0, n=GROUP_SIZE, whole_group=True,
            trajectory_ids=tuple(c.trajectory_id for c in groups[g]),
            revisions=tuple(0 for _ in groups[g]), reason="zero_variance", detail="all equal",
            input_topic_id="CC", input_from=0, input_to=1,
        )  # fmt: skip


def _trained(
    decided: Sequence[tuple[int, Any]],
    made: Sequence[tuple[list[records.Step], records.Trajectory, records.Candidate]],
) -> Iterator[tuple[int, records.TrainedTokens]]:
    """Yield what the trainer records of the steps of batches, one second later."""
    steps = {candidate.trajectory_id: found for found, _, candidate in made}
    for at, batch in decided:
        if isinstance(batch, records.ReadyBatch):
            members = (member for group in batch.groups for member in group.members)
            for step in (s for member in members for s in steps[member.trajectory_id]):
                yield at + 1000, records.TrainedTokens(
                    run_id=step.run_id, trajectory_key=step.trajectory_key,
                    trajectory_id=step.trajectory_key, step_id=step.step_id,
                    version_id=_version_id(step.run_id, batch.batch_seq),
                    batch_seq=batch.batch_seq, updates=0, logprobs=step.response_logprobs,
                    advantages=bytes(len(step.response_token_ids or b"")),
                )  # fmt: skip


def _trained_trajectories(
    decided: Sequence[tuple[int, Any]],
    made: Sequence[tuple[list[records.Step], records.Trajectory, records.Candidate]],
) -> Iterator[tuple[int, records.TrainedTrajectory]]:
    """Yield what the trainer records of the trajectories of batches: it trained every step."""
    found = {trajectory.trajectory_id: trajectory for _, trajectory, _ in made}
    for at, batch in decided:
        if isinstance(batch, records.ReadyBatch):
            for member in (m for group in batch.groups for m in group.members):
                one = found[member.trajectory_id]
                yield at + 1000, records.TrainedTrajectory(
                    run_id=one.run_id, trajectory_key=one.trajectory_key,
                    trajectory_id=one.trajectory_id,
                    version_id=_version_id(one.run_id, batch.batch_seq), batch_seq=batch.batch_seq,
                    steps=tuple(records.StepTraining(step_id=s.step_id) for s in one.steps),
                )  # fmt: skip


def _version_id(run: str, number: int) -> str:
    return f"{run}/{number + 1}.0"


def _version(run: str, topic_id: str, number: int) -> tuple[int, records.WeightVersion]:
    """Return the version that is trained on the batches up to a trajectory."""
    return _closed_ms(number) + 1000, records.WeightVersion(
        version_id=_version_id(run, number), run_id=run, sync_index=number + 1, attempt=0,
        parent_version=_version_id(run, number - AT_ONCE) if number >= AT_ONCE else None,
        format="full", files=(), channel="train", batches_topic_id=topic_id,
        first_batch_seq=number, last_batch_seq=number, metrics={}, created_at=1,
    )  # fmt: skip


def _member(candidate: records.Candidate) -> records.BatchMember:
    return records.BatchMember(
        trajectory_id=candidate.trajectory_id, trajectory_key=candidate.trajectory_key, revision=0,
        place=records.Place(topic_id="TT", partition=0, first_offset=0, last_offset=0),
        rewards=candidate.rewards, untrainable_steps=(),
        trainable_tokens=candidate.trainable_tokens,
        oldest_sync_index=candidate.oldest_sync_index,
    )  # fmt: skip
