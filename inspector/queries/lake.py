"""What the pages read: the interface of the lake, and the columns that lists keep in memory.

A list of 100,000 trajectories is filtered in memory; the pages of one trajectory read the tables of
the lake, within the log times that the copies name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Row = dict[str, Any]


class Lake(Protocol):
    """A lake with the tables and views of `docs/lake.md`, and `COPIES` as further tables."""

    def rows(
        self,
        query: str,
        parameters: Mapping[str, Any] | None = None,
        tables: Mapping[str, Any] | None = None,
    ) -> list[Row]:
        """Return the rows of a query.

        Args:
            parameters: values of `$name`.
            tables: name to Arrow table, which the query reads like those of the lake.
        """

    def find(self, search: str) -> tuple[Sequence[Any], float]:
        """Search requests and replies.

        Returns:
            An Arrow table with `run_id` and `trajectory_key` for each term of the search, and the
            share of the calls that is indexed by now.
        """

    def refresh(self) -> bool:
        """Read newer snapshots; return whether there were any."""

    def newest_commit_s(self) -> float | None:
        """Return when the newest snapshot of any table was written, in seconds since the epoch."""

    def close(self) -> None:
        """End the running query; later ones fail."""


_PLACE = "event_id, run_id, trajectory_key, trajectory_id, step_id"
_BY = '"by", epoch_us(created_at) AS made_at'

COPIES: dict[str, tuple[str, str, tuple[tuple[str, ...], str] | None]] = {
    "closed": (
        "candidates",
        """SELECT run_id, trajectory_id, trajectory_key, group_id, group_size, round, channel,
            outcome, list_sum([r.value FOR r IN rewards IF r.step_id IS NULL]) AS reward,
            list_min([r.reason FOR r IN rewards IF r.step_id IS NULL AND r.value IS NULL])
                AS unrewarded_reason,
            quality, tags, oldest_sync_index, newest_sync_index, len(steps)::INTEGER AS steps,
            len([s FOR s IN steps IF s.trainable])::INTEGER AS trainable_steps,
            list_min([coalesce(s.reason, 'excluded by curation') FOR s IN steps
                IF NOT s.trainable]) AS untrained_reason,
            prompt_tokens, trainable_tokens, trainable, reason, revision, rewards,
            as_utc(opened_at) AS opened_at, as_utc(closed_at) AS closed_at,
            as_utc(kafka_timestamp) AS kafka_timestamp, kafka_topic_id
        FROM new_rows""",
        (("kafka_topic_id", "run_id", "trajectory_id"), "revision"),
    ),
    "calls": (
        "steps",
        """SELECT run_id, trajectory_key, step_id, group_id, channel, protocol, model, user_agent,
            status, finish_reason, tags, as_utc(received_at) AS received_at,
            as_utc(finished_at) AS finished_at, as_utc(kafka_timestamp) AS kafka_timestamp,
            kafka_partition, kafka_offset
        FROM new_rows""",
        None,
    ),
    "payloads": (
        "trajectories",
        """SELECT run_id, trajectory_id, part, metadata_json, reason, steps, kafka_topic_id,
            as_utc(kafka_timestamp) AS kafka_timestamp
        FROM new_rows""",
        None,
    ),
    "members": (
        "groups",
        """SELECT run_id, channel, group_id, round, admitted, batch_seq, reason, detail,
            whole_group, kafka_topic_id, as_utc(kafka_timestamp) AS kafka_timestamp,
            unnest(trajectory_ids) AS trajectory_id, unnest(revisions) AS revision,
            unnest(rewards) AS reward, unnest(staleness) AS staleness
        FROM new_rows""",
        None,
    ),
    "errors": (
        "failed_calls",
        """SELECT run_id, trajectory_key, source, status, error_type,
            as_utc(received_at) AS received_at, as_utc(kafka_timestamp) AS kafka_timestamp
        FROM new_rows""",
        None,
    ),
    "published": (
        "weights",
        """SELECT version_id, as_utc(created_at) AS created_at,
            as_utc(kafka_timestamp) AS kafka_timestamp
        FROM new_rows""",
        None,
    ),
    "letters": (
        "dead_letters",
        """SELECT topic_id, "partition", "offset", reason,
            as_utc(kafka_timestamp) AS kafka_timestamp
        FROM new_rows""",
        None,
    ),
    "curations": (
        "curation",
        f"""SELECT {_PLACE}, quality, trainable, tags, note, NULL::VARCHAR AS reward_name,
            NULL::DOUBLE AS reward, takes_back, {_BY}
        FROM new_rows""",
        None,
    ),
    "human_rewards": (
        "rewards",
        f"""SELECT {_PLACE}, NULL::DOUBLE AS quality, NULL::BOOLEAN AS trainable,
            NULL::VARCHAR[] AS tags, reason AS note, name AS reward_name, value AS reward,
            CASE WHEN json_valid(detail_json) THEN detail_json->>'$.takes_back' END AS takes_back,
            {_BY}
        FROM new_rows WHERE source = 'human'""",
        None,
    ),
}
"""Name of a copy to its table, its columns, and the key and order of which the newest row counts.

`closed`: the newest revision of each closed trajectory. `calls`: recorded calls. `payloads`: parts
of closed trajectories. `members`: decisions of admission. `errors`: failed calls. `published`:
weight versions. `letters`: dead letters. `curations`, `human_rewards`: what people say, with the
same columns (`inspector.marks.history`).
"""
