"""A small lake with two groups of trajectories that have tokens, for exports."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from support.small_lake import SmallLake

from clawstream.schemas import records
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import pack_ids, pack_logprobs
from clawstream.stream_jobs.assemble.payload.cache import payload_of
from clawstream.stream_jobs.assemble.payload.segment_tree import SampledTokens, build
from clawstream.stream_jobs.assemble.payload.trainability import trainability

RUN = "run"
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}},
]


def turn(
    key: str, number: int, prompt: list[int], response: list[int], **changes: Any
) -> records.Step:
    """Return a step of the protocol openai.chat with one user message per environment token."""
    request = {"messages": [{"role": "user", "content": str(t)} for t in prompt], "tools": TOOLS}
    given = {
        "step_id": f"{key}~{number}.0", "run_id": RUN, "trajectory_key": key,
        "call_id": f"{key}~{number}", "choice_index": 0, "protocol": "openai.chat", "model": "m",
        "status": "ok", "streamed": False, "request_json": json.dumps(request).encode(),
        "response_json": json.dumps({"role": "assistant", "content": str(response)}).encode(),
        "prompt_token_ids": pack_ids(prompt), "response_token_ids": pack_ids(response),
        "response_logprobs": pack_logprobs([-t / 8 for t in response]),
        "version_first": f"{RUN}/1.0", "version_last": f"{RUN}/1.0", "gateway_id": "g",
        "received_at": 1, "finished_at": 1,
        "sampling": records.Sampling(
            source="engine", temperature=0.5, top_p=1.0, top_k=-1, min_p=0.0,
            presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0,
            logprobs_mode="processed_logprobs",
        ),
    }  # fmt: skip
    return records.Step(**given | changes)


def trajectory(
    key: str, steps: list[records.Step], first_offset: int, group: str
) -> records.Trajectory:
    """Return the trajectory that assemble makes of steps in log order."""
    payloads = [payload_of(s, trainability(s)) for s in steps]
    tree = build(
        [
            SampledTokens(p.prompt, p.response, p.logprobs, p.versions) if p.tokens else None
            for p in payloads
        ]
    )
    rows = [
        records.TrajectoryStep(
            step_id=s.step_id, index=node.index, parent=node.parent, segment=node.segment,
            status=s.status, drift=node.drift, prompt_tokens=len(p.prompt) // 4,
            response_tokens=len(p.response) // 4, response_json=s.response_json,
            oldest_version=trainability(s).oldest, newest_version=trainability(s).newest,
            trainable=trainability(s).reason is None, offset=first_offset + i, tags=s.tags,
            logprobs_temperature=p.logprobs_temperature,
        )
        for i, (s, node, p) in enumerate(zip(steps, tree.nodes, payloads, strict=True))
    ]  # fmt: skip
    return records.Trajectory(
        run_id=RUN, trajectory_key=key, trajectory_id=key, group_id=group, group_size=2, round=0,
        channel="train", outcome="completed", opened_at=1000, closed_at=2000,
        metadata_json=b'{"gold":"7"}', part=0, parts=1, segments=tree.segments,
        steps=tuple(sorted(rows, key=lambda row: row.index)),
    )  # fmt: skip


@dataclass
class ExportLake:
    """A lake and the trajectories that were written to it, by key."""

    lake: SmallLake
    trajectories: dict[str, records.Trajectory]

    def put(
        self,
        key: str,
        steps: list[records.Step],
        reward: float | None,
        group: str,
        untrainable: tuple[str, ...] = (),
        outcome: records.Outcome = "completed",
    ) -> None:
        """Write a closed trajectory. untrainable: steps that a curation excludes."""
        made = trajectory(key, steps, self.lake.next.get("SS", 0), group)
        self.trajectories[key] = made
        self.lake.put("steps", "SS", *steps)
        self.lake.put("trajectories", "TT", made)
        value = records.RewardValue(
            source="env", name="score", function_version="1", value=reward, reward_revision=0
        )
        candidate = records.Candidate(
            run_id=RUN, channel="train", trajectory_key=key, trajectory_id=key, group_id=group,
            group_size=2, round=0, revision=0, outcome=outcome, opened_at=1000, closed_at=2000,
            rewards=(value,), prompt_tokens=2, trainable_tokens=3, trainable=True, tags=("good",),
            steps=tuple(
                records.CandidateStep(
                    step_id=s.step_id, index=s.index, response_tokens=s.response_tokens,
                    trainable=s.trainable and s.step_id not in untrainable,
                )
                for s in made.steps
            ),
        )  # fmt: skip
        self.lake.put("candidates", "CC", candidate)


def export_lake(settings: Settings) -> ExportLake:
    """Write group `g` (a two-turn conversation, a fork) and group `h` (no tokens, no reward)."""
    made = ExportLake(SmallLake(settings), {})
    made.put(
        "g-0",
        [turn("g-0", 0, [1, 2], [3, 4]), turn("g-0", 1, [1, 2, 3, 4, 5], [6])],
        1.0,
        "g",
    )
    made.put(
        "g-1",
        [
            turn("g-1", 0, [1, 2], [7]),
            turn("g-1", 1, [1, 2, 7, 5], [8, 9]),
            turn("g-1", 2, [1, 2, 7, 6], [9]),
        ],
        0.0,
        "g",
        untrainable=("g-1~2.0",),
    )
    plain = turn("h-0", 0, [1], [2])
    absent: dict[str, Any] = dict.fromkeys(
        ("prompt_token_ids", "response_token_ids", "response_logprobs")
    )
    made.put("h-0", [replace(plain, tokens_absent_reason="no engine", **absent)], None, "h")
    made.put("h-1", [turn("h-1", 0, [1], [2, 3])], None, "h")
    return made
