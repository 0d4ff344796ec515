"""Answer questions of lineage: what a weight version was trained on, and what became of a step.

Each question first narrows the tables by columns with file statistics (run, ids, batch numbers, log
time), then joins. So the lineage of a version does not read files of other times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC
from typing import Any

from clawstream.schemas.errors import InvalidId
from clawstream.schemas.ids import key_of_step, key_of_trajectory, parse_version
from clawstream.stream_jobs.errors import StreamJobError

Row = dict[str, Any]
SKEW = "INTERVAL 1 MINUTE"
"""Maximum clock difference of brokers, added where log times of partitions bound a search."""
_STEP = (
    "step_id", "step_index", "parent_index", "response_tokens", "trained", "untrained_reason",
    "sampled_by", "tags", "drift",
)  # fmt: skip


_GROUP = ("version_id", "batch_seq", "group_id", "round")
_TRAINED_ON = """v.channel = g.channel AND v.batches_topic_id = g.kafka_topic_id
    AND g.batch_seq BETWEEN v.first_batch_seq AND v.last_batch_seq"""
"""Condition that version v was trained on the batch of row g."""


class NotInLake(StreamJobError):
    """The lake has no such version, step, trajectory or run, or lags: see `clawstream lag`."""


class Lineage:
    """Answers questions of one lake. connection: of `clawstream.query.connection.connect`."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def _rows(self, query: str) -> list[Row]:
        self._connection.execute(query)
        names = [column[0] for column in self._connection.description]
        return [dict(zip(names, row, strict=True)) for row in self._connection.fetchall()]

    def _table(self, name: str, query: str) -> str:
        self._connection.execute(f"CREATE OR REPLACE TEMP TABLE {name} AS {query}")
        return name

    # -- from a version

    def weights(self, version_id: str, ancestors: bool = False) -> Row:
        """Return a version with its ancestors and its training data.

        Args:
            ancestors: include the training data of the ancestors.

        Raises:
            NotInLake: the lake has no such version.
        """
        parsed = parse_version(version_id)
        versions = self._versions(parsed.run_id) if parsed is not None else {}
        if version_id not in versions:
            raise NotInLake(
                f"the lake has no version {version_id}: "
                "versions are named <run>/<sync index>.<attempt>"
            )
        chain = _chain(versions, version_id)
        batches = self._batches(chain if ancestors else chain[:1])
        members = [m for b in batches for g in b["groups"] for m in g["members"]]
        steps = [s for m in members for s in m["steps"]]
        return {
            "version": chain[0],
            "chain": chain,
            "descendants": _descendants(versions, version_id),
            "batches": batches,
            "totals": {
                "batches": len(batches),
                "groups": sum(len(b["groups"]) for b in batches),
                "trajectories": len(members),
                "steps": len(steps),
                "trained_steps": sum(s["trained"] for s in steps),
                "trained_tokens": sum(s["response_tokens"] for s in steps if s["trained"]),
                "sampled_by": sorted({v for s in steps if s["trained"] for v in s["sampled_by"]}),
                "not_in_lake": [m["trajectory_id"] for m in members if not m["steps"]],
            },
        }

    def _versions(self, run_id: str) -> dict[str, Row]:
        """Return all versions of a run by id, in log order."""
        query = f"""SELECT * FROM lineage_versions WHERE run_id = {_text(run_id)}
            ORDER BY published_at, version_id"""
        return {v["version_id"]: v for v in self._rows(query)}

    def _batches(self, versions: Sequence[Row]) -> list[Row]:
        """Return the batches of versions of one run, as trees down to steps."""
        trained = [v for v in versions if v["first_batch_seq"] is not None]
        if not trained:
            return []
        ids, run = _texts(v["version_id"] for v in trained), trained[0]["run_id"]
        chosen = self._table(
            "some_versions", f"SELECT * FROM lineage_versions WHERE version_id IN ({ids})"
        )
        groups = self._table(
            "some_groups",
            f"""SELECT g.* FROM groups_raw g WHERE run_id = {_text(run)} AND admitted
                AND batch_seq BETWEEN {min(v["first_batch_seq"] for v in trained)}
                    AND {max(v["last_batch_seq"] for v in trained)}
                AND EXISTS (FROM {chosen} v WHERE {_TRAINED_ON})""",
        )
        steps: dict[tuple[Any, ...], list[Row]] = {}
        for row in self._steps(run, chosen, groups):
            member = tuple(row[n] for n in (*_GROUP, "trajectory_id"))
            steps.setdefault(member, []).append({name: row[name] for name in _STEP})
        out: dict[tuple[Any, ...], Row] = {}
        for g in self._rows(
            f"""SELECT v.version_id, g.* FROM {groups} g JOIN {chosen} v ON {_TRAINED_ON}
                ORDER BY v.sync_index DESC, v.attempt DESC, g.batch_seq, g.index"""
        ):
            batch = out.setdefault(
                (g["version_id"], g["batch_seq"]),
                {"version_id": g["version_id"], "batch_seq": g["batch_seq"],
                 "channel": g["channel"],
                 "admission_policy_version": g["admission_policy_version"], "groups": []},
            )  # fmt: skip
            members = [
                {
                    "trajectory_id": m["trajectory_id"], "revision": m["revision"],
                    "reward": reward, "rewards": m["rewards"],
                    "steps": steps.get((*(g[n] for n in _GROUP), m["trajectory_id"]), []),
                }
                for m, reward in zip(g["members"], g["rewards"], strict=True)
            ]  # fmt: skip
            batch["groups"].append(
                {"group_id": g["group_id"], "round": g["round"], "n": g["n"], "members": members}
            )
        return list(out.values())

    def _steps(self, run: str, versions: str, groups: str) -> list[Row]:
        """Return steps of the members of groups. The arguments name relations."""
        members = self._table("some_members", f"SELECT unnest(members) AS m FROM {groups}")
        (bounds,) = self._rows(
            f"""SELECT min(m.place.first_offset) AS first, max(m.place.last_offset) AS last
                FROM {members}"""
        )
        if bounds["last"] is None:
            return []
        theirs = f"""SEMI JOIN {members} o ON o.m.trajectory_id = t.trajectory_id
            AND o.m.place.topic_id = t.kafka_topic_id AND o.m.place.partition = t.kafka_partition
            WHERE t.run_id = {_text(run)} AND t.kafka_offset <= {bounds["last"]}"""
        found = self._table(
            "some_trajectories",
            f"SELECT * FROM trajectories_raw t {theirs} AND t.kafka_offset >= {bounds['first']}",
        )
        # Of a trajectory sent twice, the lake has the first copy, the batch names the last one.
        whole = f"SELECT trajectory_id FROM {found} GROUP BY ALL HAVING count(*) = any_value(parts)"
        if self._rows(
            f"SELECT m.trajectory_id FROM {members} WHERE m.trajectory_id NOT IN ({whole}) LIMIT 1"
        ):
            more = self._table(
                "more_trajectories",
                f"SELECT * FROM trajectories_raw t {theirs} AND t.trajectory_id NOT IN ({whole})",
            )
            found = self._table(
                "all_trajectories",
                f"SELECT * FROM {found} WHERE trajectory_id IN ({whole}) UNION ALL FROM {more}",
            )
        (times,) = self._rows(
            f"""SELECT min(opened_at) - {SKEW} AS since, max(closed_at) + {SKEW} AS until
                FROM {found}"""
        )
        if times["since"] is None:
            return []
        steps = self._table(
            "some_steps",
            f"""SELECT run_id, step_id, versions, version_first, version_last FROM steps_raw
                WHERE run_id = {_text(run)}
                AND kafka_timestamp BETWEEN {_time(times["since"])} AND {_time(times["until"])}
                AND step_id IN (SELECT unnest(steps).step_id FROM {found})""",
        )
        trained = self._table(
            "some_trained",
            f"""SELECT * FROM trained_trajectories_raw t WHERE run_id = {_text(run)}
                AND version_id IN (SELECT version_id FROM {versions})
                AND trajectory_id IN (SELECT trajectory_id FROM {found})""",
        )
        return self._rows(
            f"""FROM lineage_steps_of('{versions}', '{groups}', '{found}', '{steps}', '{trained}')
                ORDER BY step_index"""
        )

    # -- to a version

    def step(self, step_id: str, run: str | None = None) -> list[Row]:
        """Return what became of a step, once per run that has this id. Raises NotInLake."""
        try:
            key = key_of_step(step_id)
        except InvalidId as e:
            raise NotInLake(str(e)) from e
        of_run = f"AND run_id = {_text(run)}" if run is not None else ""
        found = self._rows(
            f"""SELECT run_id, step_id, trajectory_key, group_id, channel, status, version_first,
                version_last, kafka_partition, kafka_offset, as_utc(kafka_timestamp) AS at
                FROM steps_raw WHERE step_id = {_text(step_id)} {of_run}"""
        )
        if not found:
            raise NotInLake(f"the lake has no step {step_id}{f' of run {run}' if run else ''}")
        return [self._step(row, key) for row in found]

    def _step(self, row: Row, key: str) -> Row:
        run, step_id = row["run_id"], row["step_id"]
        named = f"run_id = {_text(run)} AND step_id = {_text(step_id)}"
        at = _time(row["at"].replace(tzinfo=UTC))
        one = self._table(
            "one_step",
            f"""SELECT run_id, step_id, versions, version_first, version_last, response_token_ids
                FROM steps_raw WHERE kafka_timestamp = {at} AND {named}""",
        )
        spans = self._rows(
            f"""SELECT version, first_token, end_token FROM lineage_tokens_of('{one}')
                ORDER BY first_token"""
        )
        marks = self._rows(
            f"SELECT DISTINCT mark, trajectory_id, evidence FROM step_marks_raw WHERE {named}"
        )
        inside = self._rows(
            f"""SELECT trajectory_id, s FROM (
                    SELECT trajectory_id, unnest(steps) AS s, kafka_timestamp FROM trajectories_raw
                    WHERE run_id = {_text(run)} AND kafka_timestamp >= {at} - {SKEW}
                        AND trajectory_id BETWEEN {_text(key)} AND {_text(key + "~~")}
                ) WHERE s.step_id = {_text(step_id)} ORDER BY kafka_timestamp DESC LIMIT 1"""
        )
        out: Row = {"step": row | {"sampled_by": spans}, "marks": marks, "trajectory": None}
        if inside:
            trajectory = inside[0]["trajectory_id"]
            (out["trajectory"],) = self.trajectory(trajectory, run, [step_id])
            out["verdict"] = _verdict_of_step(out["trajectory"], inside[0]["s"], marks)
        elif marks:
            out["verdict"] = f"{marks[0]['mark']}, so not trained: {marks[0]['evidence']}"
        else:
            out["verdict"] = "its trajectory has not closed"
        return out

    def trajectory(
        self, trajectory_id: str, run: str | None = None, only: Iterable[str] | None = None
    ) -> list[Row]:
        """Return what became of a trajectory, once per run that has this id.

        Args:
            only: steps to list.

        Raises:
            NotInLake: the lake has no such trajectory.
        """
        of_run = f"AND run_id = {_text(run)}" if run is not None else ""
        found = self._rows(
            f"""SELECT run_id, any_value(group_id) AS group_id, any_value(round) AS round,
                any_value(channel) AS channel, any_value(outcome) AS outcome,
                any_value(reason) AS reason, sum(len(steps))::INTEGER AS steps,
                as_utc(min(opened_at)) AS opened_at, as_utc(max(closed_at)) AS closed_at
                FROM trajectories_raw WHERE trajectory_id = {_text(trajectory_id)} {of_run}
                GROUP BY run_id"""
        )
        if not found:
            (named,) = self._rows(
                f"""SELECT count(*) AS n FROM steps_raw
                    WHERE trajectory_key = {_text(key_of_trajectory(trajectory_id))} {of_run}"""
            )
            if named["n"]:
                why = (
                    f"{trajectory_id} has not closed: "
                    f"the lake has {named['n']} steps of its key, and no trajectory yet"
                )
                raise NotInLake(why)
            raise NotInLake(
                f"the lake has no trajectory {trajectory_id}{f' of run {run}' if run else ''}"
            )
        return [self._trajectory(trajectory_id, row, only) for row in found]

    def _trajectory(self, trajectory_id: str, row: Row, only: Iterable[str] | None) -> Row:
        run = row["run_id"]
        named = f"run_id = {_text(run)} AND trajectory_id = {_text(trajectory_id)}"
        groups = self._table(
            "some_groups",
            f"""SELECT * FROM groups_raw WHERE run_id = {_text(run)}
                AND group_id = {_text(row["group_id"])}
                AND list_contains(trajectory_ids, {_text(trajectory_id)})""",
        )
        decided = self._rows(
            f"""SELECT admitted, channel, batch_seq, round, whole_group, reason, detail,
                admission_policy_version,
                revisions[list_position(trajectory_ids, {_text(trajectory_id)})] AS revision,
                rewards[list_position(trajectory_ids, {_text(trajectory_id)})] AS reward
                FROM {groups} ORDER BY kafka_timestamp"""
        )
        candidates = self._rows(
            f"""SELECT revision, trainable, reason,
                list_sum([r.value FOR r IN rewards IF r.step_id IS NULL]) AS reward
                FROM candidates_raw WHERE {named} ORDER BY revision"""
        )
        late = self._rows(
            f"""SELECT revision, missed_batch_seq FROM late_revisions_raw
                WHERE {named} ORDER BY revision"""
        )
        wanted = set(only) if only is not None else None
        rows = [
            s
            for s in self._steps(run, "lineage_versions", groups)
            if s["trajectory_id"] == trajectory_id and (wanted is None or s["step_id"] in wanted)
        ]  # fmt: skip
        versions = self._versions(run)
        by = [v for v in versions if any(s["version_id"] == v for s in rows)]
        out = {
            "trajectory_id": trajectory_id,
            **row,
            "revisions": candidates,
            "decisions": decided,
            "late_revisions": late,
            "trained_by": [
                {
                    n: versions[v][n]
                    for n in ("version_id", "surviving", "first_batch_seq", "last_batch_seq")
                }
                | {"descendants": _descendants(versions, v)}
                for v in by
            ],
            "steps": [{"version_id": s["version_id"], **{n: s[n] for n in _STEP}} for s in rows],
        }
        return out | {"verdict": _verdict(out)}

    # -- a run

    def run(self, run_id: str) -> Row:
        """Return the counts of a run: versions, batches, groups, trajectories, steps.

        Raises:
            NotInLake: The lake has nothing of the run.
        """
        of_run, versions = f"WHERE run_id = {_text(run_id)}", list(self._versions(run_id).values())
        (steps,) = self._rows(f"SELECT count(*) AS n FROM steps_raw {of_run}")
        groups = self._rows(
            f"""SELECT channel, admitted, coalesce(reason, 'admitted') AS reason,
                count(*) AS groups, sum(len(trajectory_ids))::BIGINT AS trajectories
                FROM groups_raw {of_run} GROUP BY ALL ORDER BY ALL"""
        )
        batches = self._rows(
            f"""SELECT g.channel, g.kafka_topic_id AS batches_topic_id, count(*) AS batches,
                min(g.batch_seq) AS first_batch_seq, max(g.batch_seq) AS last_batch_seq,
                sum(g.trainable_tokens)::BIGINT AS trainable_tokens,
                count(*) FILTER (EXISTS (FROM lineage_versions v WHERE v.run_id = g.run_id
                    AND v.surviving AND {_TRAINED_ON})) AS trained
                FROM batches_raw g {of_run} GROUP BY ALL ORDER BY ALL"""
        )
        outcomes = self._rows(
            f"""SELECT channel, outcome, count(DISTINCT trajectory_id) AS trajectories
                FROM trajectories_raw {of_run} GROUP BY ALL ORDER BY ALL"""
        )
        (late,) = self._rows(f"SELECT count(*) AS n FROM late_revisions_raw {of_run}")
        if not (steps["n"] or versions or groups or outcomes):
            raise NotInLake(f"the lake has nothing of run {run_id}")
        surviving = [v for v in versions if v["surviving"]]
        return {
            "run_id": run_id,
            "head": surviving[-1]["version_id"] if surviving else None,
            "versions": len(versions),
            "surviving_versions": len(surviving),
            "abandoned": [v["version_id"] for v in versions if not v["surviving"]],
            "steps": steps["n"],
            "trajectories": outcomes,
            "groups": groups,
            "batches": batches,
            "late_revisions": late["n"],
        }


# -- versions


def _chain(versions: Mapping[str, Row], head: str) -> list[Row]:
    """Return `head` and its ancestors, newest first."""
    left, found, at = dict(versions), list[Row](), head
    while at in left:
        found.append(left.pop(at))
        at = found[-1]["parent_version"]
    return found


def _descendants(versions: Mapping[str, Row], version_id: str) -> list[str]:
    """Return the ids of all descendants of a version, in log order."""
    found = {version_id}
    for _ in versions:  # parents come first on a log, but a copied log may be in another order
        more = {v["version_id"] for v in versions.values() if v["parent_version"] in found} - found
        if not more:
            break
        found |= more
    return [v for v in versions if v in found and v != version_id]


def _verdict(trajectory: Row) -> str:
    """Describe the outcome of a trajectory in a sentence."""
    admitted = [d for d in trajectory["decisions"] if d["admitted"]]
    if admitted:
        batch = f"batch {admitted[0]['batch_seq']} of channel {admitted[0]['channel']}"
        by = [v["version_id"] for v in trajectory["trained_by"] if v["surviving"]] or [
            v["version_id"] for v in trajectory["trained_by"]
        ]
        return f"in {batch} at revision {admitted[0]['revision']}, " + (
            f"trained by {', '.join(by)}" if by else "which no version was trained on yet"
        )
    if trajectory["decisions"]:
        last = trajectory["decisions"][-1]
        return f"refused: {last['reason']}" + (f" ({last['detail']})" if last["detail"] else "")
    return "closed; neither admitted nor refused yet"


def _verdict_of_step(trajectory: Row, step_row: Row, marks: Sequence[Row]) -> str:
    if marks:
        return f"{marks[0]['mark']}, so not trained: {marks[0]['evidence']}"
    for step in trajectory["steps"]:
        if step["untrained_reason"] is not None:
            return (
                f"not trained: {step['untrained_reason']}; "
                f"its trajectory is {trajectory['verdict']}"
            )
    if not trajectory["steps"] and not step_row["trainable"]:
        return (
            f"untrainable: {step_row['untrainable_reason']}; its trajectory: "
            f"{trajectory['verdict']}"
        )
    verdict: str = trajectory["verdict"]
    return verdict


# -- SQL literals: constants are pushed down to files, parameters may not be


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _texts(values: Iterable[str]) -> str:
    return ", ".join(map(_text, values))


def _time(value: Any) -> str:
    return f"TIMESTAMPTZ '{value.isoformat()}'"
