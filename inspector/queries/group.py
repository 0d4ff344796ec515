"""A group: its rollouts side by side, with reward and advantage."""

from __future__ import annotations

from itertools import islice
from statistics import fmean, stdev
from typing import Any, NamedTuple

from clawstream.inspector.queries.conversation import ReadChat, brief, turns_of
from clawstream.inspector.queries.lake import Lake, Row
from clawstream.inspector.queries.trajectory import with_bodies

STEPS_SHOWN = 50
"""First steps of a rollout that its column shows."""


class Rewards(NamedTuple):
    """The rewards of a round that are compared. spread: the standard deviation, over n - 1."""

    known: int
    mean: float | None
    spread: float | None


def group_of(lake: Lake, run_id: str, group_id: str, read: ReadChat) -> dict[str, Any] | None:
    """Return the rounds of a group, newest first, each with its rollouts; None if there is none.

    The advantage of a rollout is its training reward minus the mean of those it is compared with:
    the members of its batch, before there is one all of its round. `normalized` divides it by the
    standard deviation, as GRPO does (arXiv:2402.03300, section 4.1.2).
    """
    who = {"run": run_id, "group": group_id}
    rollouts = lake.rows(
        """WITH decided AS (
            SELECT run_id, trajectory_id, max_by(members, kafka_timestamp) AS decision
            FROM members WHERE run_id = $run AND group_id = $group GROUP BY ALL)
        SELECT c.*, d.decision, p.steps AS details FROM closed c
            LEFT JOIN decided d USING (run_id, trajectory_id)
            LEFT JOIN payloads p ON p.run_id = c.run_id AND p.trajectory_id = c.trajectory_id
                AND p.part = 0
        WHERE c.run_id = $run AND c.group_id = $group
        ORDER BY c.round DESC NULLS LAST, c.trajectory_id""",
        who,
    )
    if not rollouts:
        return None
    _add_turns(lake, run_id, rollouts, read)
    rounds: dict[Any, list[Row]] = {}
    for rollout in rollouts:
        decision = rollout["decision"] or {}
        number = rollout["round"] if rollout["round"] is not None else decision.get("round")
        rounds.setdefault(number, []).append(rollout)
    rewards = {number: _add_advantages(members) for number, members in rounds.items()}
    return {"run_id": run_id, "group_id": group_id, "rounds": rounds, "rewards": rewards}


def _add_advantages(members: list[Row]) -> Rewards:
    taken = [m for m in members if m["batch_seq"] is not None]
    compared = [m for m in taken or members if m["reward"] is not None]
    rewards = [m["reward"] for m in compared]
    mean = fmean(rewards) if rewards else None
    spread = stdev(rewards) if len(rewards) > 1 else None
    for m in members:
        known = mean is not None and m in compared
        m["advantage"] = m["reward"] - mean if known else None
        m["normalized"] = m["advantage"] / spread if known and spread else None
    return Rewards(len(rewards), mean, spread)


def _add_turns(lake: Lake, run_id: str, rollouts: list[Row], read: ReadChat) -> None:
    """Add to each rollout its steps in one line each, and its task: what the first one asked."""
    ids = [s["step_id"] for r in rollouts for s in (r["details"] or ())[:STEPS_SHOWN]]
    calls = lake.rows(
        """SELECT step_id, protocol, kafka_timestamp FROM calls
        WHERE run_id = $run AND step_id IN $ids""",
        {"run": run_id, "ids": ids},
    )
    known = {call["step_id"]: call for call in calls}
    columns = []
    for rollout in rollouts:
        details = sorted(rollout.pop("details") or (), key=lambda s: s["index"])
        steps = [s | known[s["step_id"]] for s in details if s["step_id"] in known][:STEPS_SHOWN]
        rollout["more"] = len(details) - len(steps)
        columns.append(steps)
    recorded = with_bodies(lake, run_id, [step for steps in columns for step in steps])
    for rollout, steps in zip(rollouts, columns, strict=True):
        turns, _ = turns_of(islice(recorded, len(steps)), read)
        rollout["lines"] = [
            {
                "index": s["index"],
                "text": brief(t.reply),
                "reasoning": t.reply.reasoning if t.reply else "",
                "results": [p for p in t.added if p.answers],
            }
            for s, t in zip(steps, turns, strict=True)
        ]
        asked = [p.text for t in turns[:1] for p in t.added if p.role == "user"]
        rollout["task"] = asked[-1] if asked else None
