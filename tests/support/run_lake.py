"""A small lake with a run of two weight versions, for queries whose answers can be told by hand.

| group | task | members: reward, versions that sampled | what became of it |
| --- | --- | --- | --- |
| add-0 | add | add-0-0: 1, 0.0; add-0-1: 0, later 0.5, 0.0 | batch 0, trained into 1.0 |
| sub-0 | sub | sub-0-0: 0, 0.0; sub-0-1: 0, 0.0 | refused: zero_variance |
| add-1 | add | add-1-0: 0.5, 0.0; add-1-1: 1, 1.0 | batch 1, trained into 2.0 |
| sub-1 | sub | sub-1-0: no reward yet, 1.0 | waits |

Besides: a step of an open trajectory, a step that came too late, a call that failed, a reward that
came after its batch, and marks of two people.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from support.export_lake import RUN, trajectory, turn
from support.small_lake import SmallLake

from clawstream.schemas import records
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import pack_logprobs

CODEX, FLOW = "codex/1.0", "agent-flow/0.1"


def call(
    key: str, number: int, prompt: list[int], response: list[int], version: int = 0, **changes: Any
) -> records.Step:
    """Return a step that took 10 ms a prompt token and 100 ms a response token from time 0."""
    prompt_s, response_s = len(prompt) * 10_000, len(response) * 100_000
    given: dict[str, Any] = {
        "version_first": f"{RUN}/{version}.0",
        "version_last": f"{RUN}/{version}.0",
        "finish_reason": "stop",
        "received_at": 0,
        "finished_at": prompt_s + response_s,
        "time_to_first_token_ms": prompt_s / 1000,
        "user_agent": FLOW,
        "usage": records.Usage(
            prompt_tokens=len(prompt),
            cached_tokens=len(prompt) - 1,
            completion_tokens=len(response),
        ),
    }
    return turn(key, number, prompt, response, **given | changes)


def tool_call(name: str, **arguments: Any) -> bytes:
    """Return the reply of a step that calls a tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    return json.dumps(message).encode()


class RunLake(SmallLake):
    """Writes the records of the run. candidates: the first revisions, by trajectory."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.candidates: dict[str, records.Candidate] = {}

    def closed(
        self, key: str, steps: list[records.Step], reward: float | None, version: int = 0
    ) -> None:
        """Write a closed trajectory, its steps and its candidate."""
        group, task = key.rpartition("-")[0], key.partition("-")[0]
        made = replace(
            trajectory(key, steps, self.next.get("SS", 0), group),
            metadata_json=json.dumps({"id": task}).encode(),
        )
        self.put("steps", "SS", *steps)
        self.put("trajectories", "TT", made)
        sampled = sum(s.response_tokens for s in made.steps)
        candidate = records.Candidate(
            run_id=RUN, channel="train", trajectory_key=key, trajectory_id=key, group_id=group,
            group_size=2, round=0, revision=0, outcome="completed", opened_at=1000, closed_at=2000,
            rewards=(value(reward),) if reward is not None else (), prompt_tokens=2,
            trainable_tokens=sampled, oldest_sync_index=version, newest_sync_index=version,
            trainable=True,
            steps=tuple(
                records.CandidateStep(
                    step_id=s.step_id, index=s.index, response_tokens=s.response_tokens,
                    trainable=True, oldest_sync_index=version,
                )
                for s in made.steps
            ),
        )  # fmt: skip
        self.put("candidates", "CC", candidate)
        self.candidates[key] = candidate
        if reward is not None:
            self.put("rewards", "RR", sent(key, reward))

    def member(
        self, key: str, place: int, reward: float, sync: int, untrainable: tuple[str, ...] = ()
    ) -> records.BatchMember:
        where = records.Place(topic_id="TT", partition=0, first_offset=place, last_offset=place)
        return records.BatchMember(
            trajectory_id=key, trajectory_key=key, revision=0, place=where,
            rewards=(value(reward),), untrainable_steps=untrainable, trainable_tokens=3,
            oldest_sync_index=sync,
        )  # fmt: skip

    def batch(self, seq: int, group: str, members: Sequence[records.BatchMember]) -> None:
        record = records.ReadyBatch(
            run_id=RUN, channel="train", batch_seq=seq, policy_version=1, sync_every=1,
            groups=(records.BatchGroup(group_id=group, round=0, n=2, members=tuple(members)),),
            algorithm="grpo", reward_weights={}, input_topic_id="CC", input_partition=0,
            input_from=0, input_to=1, content_hash="h", trainable_tokens=6,
            created_at_event_time=1,
        )  # fmt: skip
        self.put("batches", "BB", record)
        self.next["BB"] -= 1  # the same record makes the rows of both tables
        self.put("groups", "BB", record)

    def version(self, sync: int, **metrics: float) -> None:
        """Publish a version, trained on the batch before it, at second 1 + sync / 1000."""
        weights = records.WeightVersion(
            version_id=f"{RUN}/{sync}.0", run_id=RUN, sync_index=sync, attempt=0, format="full",
            files=(), channel="train", parent_version=f"{RUN}/{sync - 1}.0" if sync else None,
            batches_topic_id="BB" if sync else None, first_batch_seq=sync - 1 if sync else None,
            last_batch_seq=sync - 1 if sync else None, metrics=metrics, created_at=1,
        )  # fmt: skip
        self.put("weights", "WW", weights)

    def trained(self, step_id: str, sync: int, response: list[int], updates: int = 0) -> None:
        """Write what the trainer saw of a step: the engine's log-probabilities less 2^-token."""
        key = step_id.partition("~")[0]
        record = records.TrainedTokens(
            run_id=RUN, trajectory_key=key, trajectory_id=key, step_id=step_id,
            version_id=f"{RUN}/{sync}.0", batch_seq=sync - 1, updates=updates,
            logprobs=pack_logprobs([-t / 8 - 2**-t for t in response]),
            advantages=pack_logprobs([1.0] * len(response)),
        )  # fmt: skip
        self.put("trained_tokens", "NN", record)

    def decided(self, sync: int, reasons: dict[str, str | None]) -> None:
        """Write what the trainer did with all steps of a batch. reasons: by step id."""
        by_key: dict[str, list[records.StepTraining]] = {}
        for step_id, reason in reasons.items():
            one = records.StepTraining(step_id=step_id, untrained_reason=reason)
            by_key.setdefault(step_id.partition("~")[0], []).append(one)
        made = [
            records.TrainedTrajectory(
                run_id=RUN, trajectory_key=key, trajectory_id=key, version_id=f"{RUN}/{sync}.0",
                batch_seq=sync - 1, steps=tuple(steps),
            )
            for key, steps in by_key.items()
        ]  # fmt: skip
        self.put("trained_trajectories", "NT", *made)


def value(reward: float) -> records.RewardValue:
    return records.RewardValue(
        source="env", name="score", function_version="1", value=reward, reward_revision=0
    )


def sent(key: str, reward: float | None, revision: int = 0, **changes: Any) -> records.Reward:
    given: dict[str, Any] = {
        "event_id": f"{key}-{revision}-{changes.get('source')}", "run_id": RUN,
        "trajectory_key": key, "source": "env", "name": "score", "function_version": "1",
        "value": reward, "reward_revision": revision, "created_at": 1,
    }  # fmt: skip
    return records.Reward(**given | changes)


def mark(number: int, key: str, by: str, **changes: Any) -> records.Curation:
    return records.Curation(
        event_id=f"m{number}", run_id=RUN, trajectory_key=key, by=by, created_at=1, **changes
    )


def run_lake(settings: Settings) -> RunLake:
    """Write the run. Return the lake, to write more."""
    lake = RunLake(settings)
    search = {"response_json": tool_call("search", q="x"), "user_agent": CODEX}
    lake.closed(
        "add-0-0",
        [
            call("add-0-0", 0, [1, 2], [3, 4], response_json=tool_call("search", q="y")),
            call("add-0-0", 1, [1, 2, 3, 4, 5], [6]),
        ],
        1.0,
    )
    lake.closed(
        "add-0-1",
        [
            call("add-0-1", 0, [1, 2], [7], **search),
            call("add-0-1", 1, [1, 2, 7, 5], [8, 9], **search),
            call("add-0-1", 2, [1, 2, 6, 8], [9], **search),  # its prompt lacks the last reply
        ],
        0.0,
    )
    cut = {"finish_reason": "length"}
    lake.closed("sub-0-0", [call("sub-0-0", 0, [1, 2], [3, 4, 5, 6], **cut)], 0.0)
    lake.closed("sub-0-1", [call("sub-0-1", 0, [1, 2], [3])], 0.0)
    lake.closed("add-1-0", [call("add-1-0", 0, [1, 2], [3])], 0.5)
    lake.closed("add-1-1", [call("add-1-1", 0, [1, 2], [3, 4, 5], 1)], 1.0, 1)
    lake.closed("sub-1-0", [call("sub-1-0", 0, [1, 2], [3], 1)], None, 1)

    lake.version(0)
    lake.batch(
        0,
        "add-0",
        [
            lake.member("add-0-0", 0, 1.0, 0),
            lake.member("add-0-1", 1, 0.0, 0, ("add-0-1~0.0",)),
        ],
    )
    lake.version(1, logp_mean_abs_diff_same_version=0.01, logp_max_abs_diff_same_version=0.125)
    refused = records.Refused(
        run_id=RUN, channel="train", group_id="sub-0", round=0, n=2, whole_group=True,
        trajectory_ids=("sub-0-0", "sub-0-1"), revisions=(0, 0), reason="zero_variance",
        detail="all 0.0", input_topic_id="CC", input_from=0, input_to=1,
    )  # fmt: skip
    lake.put("groups", "BB", refused)
    lake.batch(
        1,
        "add-1",
        [lake.member("add-1-0", 4, 0.5, 0), lake.member("add-1-1", 5, 1.0, 1)],
    )
    lake.version(2, logp_mean_abs_diff_same_version=0.25, logp_max_abs_diff_same_version=0.5)
    add_0 = ("add-0-0~0.0", "add-0-0~1.0", "add-0-1~1.0", "add-0-1~2.0")
    for step_id, engine in zip(add_0, ([3, 4], [6], [8, 9], [9]), strict=True):
        lake.trained(step_id, 1, engine)
    left_out = {"add-0-1~0.0": "left out by curation, or by policy 1"}
    lake.decided(1, dict.fromkeys(add_0) | left_out)
    lake.decided(2, dict.fromkeys(("add-1-0~0.0", "add-1-1~0.0")))
    lake.trained("add-1-0~0.0", 2, [3])
    lake.trained("add-1-1~0.0", 2, [3, 4, 5], updates=1)
    others(lake)
    return lake


def others(lake: RunLake) -> None:
    """Write what is outside of the trajectories."""
    lake.put("steps", "SS", call("open-0", 0, [1], [2]), call("add-0-0", 9, [1], [2]))
    late = records.StepMark(
        event_id="l", run_id=RUN, trajectory_key="add-0-0", trajectory_id="add-0-0",
        step_id="add-0-0~9.0", mark="late", offset=9,
    )  # fmt: skip
    lake.put("step_marks", "MM", late)
    failed = records.FailedCall(
        event_id="f", run_id=RUN, trajectory_key="add-2-0", protocol="openai.chat", streamed=False,
        source="engine", status=503, error_type="overloaded", message="full", user_agent=CODEX,
        gateway_id="g", received_at=0, duration_ms=5.0,
    )  # fmt: skip
    lake.put("failed_calls", "FF", failed)
    lake.put(
        "rewards",
        "RR",
        sent("add-0-1", 0.5, 1),
        sent("sub-0-0", None, source="judge", name="helpful", reason="no text"),
        sent("sub-0-1", 0.25, source="judge", name="helpful"),
    )
    passed = records.Late(
        run_id=RUN, channel="train", trajectory_id="add-0-1", revision=1, missed_batch_seq=0,
        input_to=9,
    )  # fmt: skip
    lake.put("late_revisions", "BB", passed)
    revised = replace(lake.candidates["add-0-1"], revision=1, rewards=(value(0.5),))
    lake.put("candidates", "CC", revised)
    lake.put(
        "curation",
        "UU",
        mark(0, "add-0-1", "alice", quality=0.25, note="loops"),
        mark(1, "add-0-1", "bob", trainable=False, tags=("loop",)),
        mark(2, "add-0-1", "bob", tags=()),
        mark(3, "sub-1-0", "alice", step_id="sub-1-0~0.0", quality=1.0),
    )
