"""What the pages read: the interface of the lake, and the columns that lists keep in memory.

A list of 100,000 trajectories is filtered in memory; the pages of one trajectory read the tables of
the lake, within the log times that the copies name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

Row = dict[str, Any]


class Lake(Protocol):
    """A lake with the tables and views of `docs/lake.md`, and `COPIES` as further tables."""

    def rows(
        self,
        query: str,
        parameters: Mapping[str, Any] | None = None,
        tables: Mapping[str, Any] | None = None,
        is_long: bool = False,
    ) -> list[Row]:
        """Return the rows of a query.

        Args:
            parameters: values of `$name`.
            tables: name to Arrow table, which the query reads like those of the lake.
            is_long: it may take longer than a page; one such query runs at a time.
        """

    @property
    def failed(self) -> Mapping[str, str]:
        """Tables whose newest version is not shown, with the reason."""

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


class Copied(NamedTuple):
    """Columns of a table in memory.

    table: of the lake. select: SELECT over its `new_rows`. newest: key and order of which the
    newest row counts; None: each row does. then: a statement that follows the new rows elsewhere.
    """

    table: str
    select: str
    newest: tuple[tuple[str, ...], str] | None = None
    then: str | None = None


_PLACE = "event_id, run_id, trajectory_key, trajectory_id, step_id"
_BY = '"by", epoch_us(created_at) AS made_at'


def _decided(keys: str) -> str:
    """Return SQL for the batch that took each trajectory of `keys`, and its reward there."""
    return f"""SELECT run_id, trajectory_id, reward AS decided_reward, batch_seq
        FROM members SEMI JOIN {keys} USING (run_id, trajectory_id) WHERE admitted
        QUALIFY row_number() OVER (
            PARTITION BY run_id, trajectory_id ORDER BY kafka_timestamp DESC) = 1"""


_WEIGHED = "training_reward_of(rewards, coalesce(weights, MAP {}))"
_MEMBERS = "(SELECT run_id, unnest(trajectory_ids) AS trajectory_id FROM new_rows WHERE admitted)"

COPIES = {
    "members": Copied(
        "groups",
        """SELECT run_id, channel, group_id, round, admitted, batch_seq, reason, detail,
            whole_group, kafka_topic_id, as_utc(kafka_timestamp) AS kafka_timestamp,
            unnest(trajectory_ids) AS trajectory_id, unnest(revisions) AS revision,
            unnest(rewards) AS reward, unnest(staleness) AS staleness
        FROM new_rows""",
        None,
        f"""UPDATE closed SET reward = decided_reward, batch_seq = d.batch_seq
        FROM ({_decided(_MEMBERS)}) d
        WHERE d.run_id = closed.run_id AND d.trajectory_id = closed.trajectory_id""",
    ),
    "policies": Copied(
        "run_events",
        """SELECT run_id, channel, admission_policy_version AS version,
            from_json(policy_json, '{"reward_weights": "MAP(VARCHAR, DOUBLE)"}').reward_weights
                AS weights
        FROM new_rows WHERE kind = 'policy_applied'""",
        (("run_id", "channel"), "version"),
        f"""UPDATE closed SET reward = {_WEIGHED}, policy_version = p.version
        FROM policies p WHERE p.run_id = closed.run_id AND p.channel = closed.channel
            AND batch_seq IS NULL
            AND p.run_id IN (SELECT run_id FROM new_rows WHERE kind = 'policy_applied')""",
    ),
    "closed": Copied(
        "candidates",
        f"""SELECT run_id, trajectory_id, trajectory_key, group_id, group_size, round, channel,
            outcome, CASE WHEN batch_seq IS NULL THEN {_WEIGHED} ELSE decided_reward END AS reward,
            batch_seq, version AS policy_version,
            list_min([r.reason FOR r IN rewards IF r.step_id IS NULL AND r.value IS NULL])
                AS unrewarded_reason,
            quality, tags, oldest_sync_index, newest_sync_index, len(steps)::INTEGER AS steps,
            prompt_tokens, trainable_tokens, trainable, reason, revision, rewards,
            [{{'name': r.name, 'value': r.value}} FOR r IN rewards
                IF r.source = 'human' AND r.step_id IS NULL AND r.value IS NOT NULL] AS ratings,
            as_utc(opened_at) AS opened_at, as_utc(closed_at) AS closed_at,
            as_utc(kafka_timestamp) AS kafka_timestamp, kafka_topic_id
        FROM new_rows LEFT JOIN ({_decided("new_rows")}) USING (run_id, trajectory_id)
            LEFT JOIN policies USING (run_id, channel)""",
        (("kafka_topic_id", "run_id", "trajectory_id"), "revision"),
    ),
    "calls": Copied(
        "steps",
        """SELECT run_id, trajectory_key, step_id, group_id, channel, protocol, model, user_agent,
            status, finish_reason, tags, as_utc(received_at) AS received_at,
            as_utc(finished_at) AS finished_at, as_utc(kafka_timestamp) AS kafka_timestamp,
            kafka_partition, kafka_offset
        FROM new_rows""",
    ),
    "payloads": Copied(
        "trajectories",
        """SELECT run_id, trajectory_id, part, metadata_json, reason, steps, kafka_topic_id,
            as_utc(kafka_timestamp) AS kafka_timestamp
        FROM new_rows""",
    ),
    "errors": Copied(
        "failed_calls",
        """SELECT event_id, run_id, trajectory_key, status, model, user_agent, duration_ms,
            source || ': ' || coalesce(error_type, status::VARCHAR) AS reason,
            left(message, 2000) AS message, as_utc(received_at) AS received_at,
            as_utc(kafka_timestamp) AS kafka_timestamp
        FROM new_rows""",
    ),
    "outside": Copied(
        "step_marks",
        """SELECT run_id, trajectory_id, step_id, mark, evidence FROM new_rows
        WHERE mark IN ('late', 'duplicate', 'orphan')""",
    ),
    "trained": Copied(
        "trained_trajectories",
        """SELECT run_id, trajectory_id, version_id,
            len([s FOR s IN steps IF s.untrained_reason IS NULL])::INTEGER AS trained_steps,
            [{'step_id': s.step_id, 'reason': s.untrained_reason} FOR s IN steps
                IF s.untrained_reason IS NOT NULL] AS untrained
        FROM new_rows""",
    ),
    "published": Copied(
        "weights",
        """SELECT version_id, as_utc(created_at) AS created_at,
            as_utc(kafka_timestamp) AS kafka_timestamp
        FROM new_rows""",
    ),
    "letters": Copied(
        "dead_letters",
        """SELECT topic, topic_id, "partition", "offset", process, reason,
            left(detail, 500) AS detail,
            as_utc(kafka_timestamp) AS kafka_timestamp
        FROM new_rows""",
    ),
    "curations": Copied(
        "curation",
        f"""SELECT {_PLACE}, quality, trainable, tags, note, NULL::VARCHAR AS reward_name,
            NULL::DOUBLE AS reward, takes_back, {_BY}
        FROM new_rows""",
    ),
    "human_rewards": Copied(
        "rewards",
        f"""SELECT {_PLACE}, NULL::DOUBLE AS quality, NULL::BOOLEAN AS trainable,
            NULL::VARCHAR[] AS tags, reason AS note, name AS reward_name, value AS reward,
            CASE WHEN json_valid(detail_json) THEN detail_json->>'$.takes_back' END AS takes_back,
            {_BY}
        FROM new_rows WHERE source = 'human'""",
    ),
}
"""The copies by name.

`closed`: the newest revision of each closed trajectory. Its `reward` is that of training: of the
batch that took it, else by the weights of the newest applied policy (`policies`), else the sum.
`calls`: recorded calls. `payloads`: parts of closed trajectories. `members`: decisions of
admission. `errors`: failed calls. `outside`: recorded calls that are in no trajectory. `trained`:
what the trainer did with a trajectory. `published`: weight versions. `letters`: dead letters.
`curations`, `human_rewards`: what people say, with the same columns
(`clawstream.inspector.marks.history`).
"""
