"""The newest trajectories, folded from `claw.steps` and `claw.candidates`. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from clawstream.schemas.conversation import answer_in, calls_in, loaded
from clawstream.schemas.records import Candidate, SessionEvent, Step
from clawstream.schemas.reward_matching import training_reward

Weights = Mapping[tuple[str, str | None], Mapping[str, float]]
KEPT = 200
SNIPPET = 160


class Recent:
    """The trajectories with the newest records, open or closed; the oldest are forgotten."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[tuple[str, str], dict[str, Any]] = OrderedDict()

    def fold(self, event: Any, timestamp_ms: int) -> bool:
        """Fold a record; return whether it changed anything.

        Args:
            timestamp_ms: log time of the record.
        """
        if isinstance(event, Step):
            row = self._row(event.run_id, event.trajectory_key, timestamp_ms)
            row["steps"] += 1
            row["model"], row["said"] = event.model, _said(event.response_json)
            row["group_id"] = event.group_id or row["group_id"]
        elif isinstance(event, SessionEvent):
            row = self._row(event.run_id, event.trajectory_key, timestamp_ms)
            row["group_id"] = event.group_id or row["group_id"]
        elif isinstance(event, Candidate):
            if event.revision:  # somebody marked or rated what has closed: it is no news
                known = self._by_key.get((event.run_id, event.trajectory_key))
                if known is not None and known["trajectory_id"] == event.trajectory_id:
                    known["rewards"] = event.rewards
                return known is not None
            row = self._row(event.run_id, event.trajectory_key, timestamp_ms)
            row |= {
                "trajectory_id": event.trajectory_id, "outcome": event.outcome,
                "group_id": event.group_id, "steps": len(event.steps),
                "channel": event.channel, "rewards": event.rewards,
            }  # fmt: skip
        else:
            return False
        return True

    def rows(self, limit: int, run_id: str | None = None) -> list[dict[str, Any]]:
        """Return the newest trajectories, of all runs or of one, newest first."""
        return [dict(row) for row in newest(reversed(self._by_key.values()), limit, run_id)]

    def _row(self, run_id: str, key: str, timestamp_ms: int) -> dict[str, Any]:
        """Return the row of a trajectory, moved to the newest place."""
        row = self._by_key.setdefault(
            (run_id, key),
            {
                "run_id": run_id, "trajectory_key": key, "trajectory_id": key, "group_id": None,
                "steps": 0, "model": None, "said": "", "outcome": None, "channel": None,
                "rewards": (),
            },
        )  # fmt: skip
        row["at"] = datetime.fromtimestamp(timestamp_ms / 1000, UTC).replace(tzinfo=None)
        self._by_key.move_to_end((run_id, key))
        if len(self._by_key) > KEPT:
            self._by_key.popitem(last=False)
        return row


def with_rewards(
    rows: Iterable[dict[str, Any]], known: Mapping[tuple[str, str], float | None], weights: Weights
) -> list[dict[str, Any]]:
    """Return rows with their training reward.

    Args:
        rows: Of `Recent`.
        known: Rewards that the lake has, by run and trajectory id.
        weights: Of the policy in force, by run and channel.
    """
    return [
        row | {
            "reward": known[key] if (key := (row["run_id"], row["trajectory_id"])) in known
            else training_reward(weights.get((row["run_id"], row["channel"]), {}), row["rewards"])
        }
        for row in rows
    ]  # fmt: skip


def newest(
    rows: Iterable[dict[str, Any]], limit: int, run_id: str | None
) -> Iterator[dict[str, Any]]:
    """Return the first rows, of all runs or of one."""
    return islice((row for row in rows if run_id in (None, row["run_id"])), limit)


def _said(response_json: bytes) -> str:
    """Return the beginning of a reply, or the tools it calls."""
    try:
        reply = loaded(response_json)
    except ValueError:
        return ""
    text = answer_in(reply) or ", ".join(call.name or "?" for call in calls_in(reply))
    return " ".join(text.split())[:SNIPPET]
