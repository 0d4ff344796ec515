"""One trajectory: its steps as recorded, where they came from, and what became of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from clawstream.inspector.queries.lake import Lake, Row
from clawstream.schemas.ids import is_gateway_assigned, key_of_trajectory
from clawstream.schemas.records import RewardValue
from clawstream.schemas.reward_matching import training_reward

_SKEW = "INTERVAL 1 MINUTE"
"""Maximum difference between the log times of a trajectory and of its steps, as in lineage."""
_BODIES = "step_id, request_json, response_json"
PAGE = 50
"""Steps of a page."""
_AT_ONCE = 16
"""Steps whose bodies are in memory at once. A request repeats the messages before it."""


class Moment(NamedTuple):
    """A moment of the timeline.

    where: the process or topic. step: index of the step; None: of the trajectory. after_s: since
    the first moment.
    """

    at: Any
    where: str
    what: str
    step: int | None
    after_s: float


class Span(NamedTuple):
    """The call of a step. left, width: its place between the first and last call, in percent."""

    seconds: float
    left: float
    width: float


class Trajectory(NamedTuple):
    """A trajectory.

    head: its row of `closed`; of an open one, what its calls say. steps: the recorded steps by
    index, without bodies and tokens, with `index`, `parent`, `drift`, `trainable` and `lane` once
    it is closed; then those that came too late to be in it. failures: failed calls, in order of
    time. weights: of its training reward, by `source/name`; None: no policy is in force.
    decisions: rows of `members`. versions: weight versions of its batch, each with the number of
    trained steps and the untrained ones.
    """

    head: Row
    steps: list[Row]
    failures: list[Row]
    weights: Mapping[str, float] | None
    metadata_json: str | None
    decisions: list[Row]
    versions: list[Row]
    findings: list[Row]

    @property
    def is_open(self) -> bool:
        return self.head.get("outcome") is None

    @property
    def reward_now(self) -> float | None:
        """The training reward of the rewards that count now: a batch may have had others."""
        values = [RewardValue(**row) for row in self.head.get("rewards") or ()]
        return training_reward(self.weights or {}, values)

    def weight_of(self, reward: Row) -> float | None:
        """Return the weight of a reward in the training reward; None: it has no part in it."""
        if reward["step_id"] is not None or reward["value"] is None:
            return None
        name = f"{reward['source']}/{reward['name']}"
        return self.weights.get(name) if self.weights else 1.0


def find(lake: Lake, run_id: str, trajectory_id: str) -> Trajectory | None:
    """Return a trajectory; None if the lake does not have it.

    It is in memory: no file of the lake's steps is read. An open trajectory is found by its key.
    """
    who = {"run": run_id, "id": trajectory_id}
    closed = lake.rows(
        """SELECT * FROM closed WHERE run_id = $run AND trajectory_id = $id
        ORDER BY kafka_timestamp DESC LIMIT 1""",
        who,
    )
    if not closed:
        return _open(lake, run_id, trajectory_id)
    head = closed[0]
    parts = lake.rows(
        """SELECT metadata_json, reason AS outcome_reason, steps, kafka_timestamp AS assembled_at
        FROM payloads WHERE run_id = $run AND trajectory_id = $id
        ORDER BY kafka_timestamp DESC, part""",
        who,
    )
    details = {s["step_id"]: s for part in parts for s in part["steps"]}
    steps = lake.rows(
        """SELECT * FROM calls WHERE run_id = $run AND step_id IN $ids
        ORDER BY kafka_partition, kafka_offset""",
        {"run": run_id, "ids": list(details)},
    )
    merged = [details[s["step_id"]] | s for s in steps]
    merged.sort(key=lambda s: s["index"])
    merged += _late(lake, who, details, merged)
    first = parts[0] if parts else {}
    head |= {name: first.get(name) for name in ("outcome_reason", "assembled_at")}
    decisions = lake.rows(
        """SELECT * FROM members WHERE run_id = $run AND trajectory_id = $id
        ORDER BY kafka_timestamp""",
        who,
    )
    versions = _trained_versions(lake, who, decisions)
    return Trajectory(
        head,
        _with_lanes(_with_reasons(merged, versions)),
        _failures(lake, run_id, trajectory_id, head),
        _weights(lake, head, decisions),
        first.get("metadata_json"),
        decisions,
        versions,
        _findings(lake, head),
    )


def _open(lake: Lake, run_id: str, key: str) -> Trajectory | None:
    who = {"run": run_id, "key": key}
    found = lake.rows(
        """SELECT run_id, trajectory_key, any_value(group_id) AS group_id,
            any_value(channel) AS channel, min(received_at) AS opened_at,
            max(kafka_timestamp) AS closed_at
        FROM calls WHERE run_id = $run AND trajectory_key = $key GROUP BY ALL""",
        who,
    )
    failures = _failures(lake, run_id, key)
    if not found and not failures:
        return None
    at = failures[0]["kafka_timestamp"] if failures else None
    empty = {"group_id": None, "channel": None, "opened_at": at}
    head = found[0] if found else {"run_id": run_id, "trajectory_key": key, **empty}
    steps = lake.rows(
        """SELECT * FROM calls WHERE run_id = $run AND trajectory_key = $key
        ORDER BY kafka_partition, kafka_offset""",
        who,
    )
    for index, step in enumerate(steps):
        step |= {"index": index, "parent": index - 1 if index else None, "lane": 0}
        # Known when it has closed.
        step |= dict.fromkeys(("prompt_tokens", "response_tokens", "drift", "marks"))
    head |= {"trajectory_id": key, "closed_at": None}
    return Trajectory(head, steps, failures, None, None, [], [], [])


def _late(lake: Lake, who: Row, inside: Mapping[str, Row], before: Sequence[Row]) -> list[Row]:
    """Return the recorded steps of a trajectory that are not in it, as steps after the others."""
    found = lake.rows(
        """SELECT c.*, list(DISTINCT o.mark ORDER BY o.mark) AS marks
        FROM outside o JOIN calls c USING (run_id, step_id)
        WHERE o.run_id = $run AND o.trajectory_id = $id GROUP BY ALL
        ORDER BY kafka_partition, kafka_offset""",
        who,
    )
    first = before[-1]["index"] + 1 if before else 0
    late = [step for step in found if step["step_id"] not in inside]
    return [
        step | {
            "index": index, "parent": None, "drift": "root", "trainable": False,
            "untrainable_reason": f"not in the trajectory: {', '.join(step['marks'])}",
            "prompt_tokens": None, "response_tokens": None,
        }
        for index, step in enumerate(late, first)
    ]  # fmt: skip


def _failures(lake: Lake, run_id: str, trajectory_id: str, head: Row | None = None) -> list[Row]:
    """Return the failed calls of a trajectory, in order of time.

    A session without an id of its own has the calls of several trajectories: those in the time of
    this one are taken.
    """
    key = key_of_trajectory(trajectory_id)
    is_part = head is not None and is_gateway_assigned(key) and trajectory_id != key
    return lake.rows(
        f"""SELECT * FROM errors WHERE run_id = $run AND trajectory_key = $key
            AND (NOT $is_part OR kafka_timestamp BETWEEN $first::TIMESTAMP - {_SKEW}
                AND $last::TIMESTAMP + {_SKEW})
        ORDER BY received_at""",
        {
            "run": run_id, "key": key, "is_part": is_part,
            "first": head["opened_at"] if head else None,
            "last": head["closed_at"] if head else None,
        },
    )  # fmt: skip


def _weights(lake: Lake, head: Row, decisions: Sequence[Row]) -> Mapping[str, float] | None:
    """Return the weights of its rewards: of its batch, else of the policy in force."""
    batches = [d for d in decisions if d["admitted"]]
    if batches:
        found = lake.rows(
            """SELECT reward_weights AS weights FROM batches_raw WHERE run_id = $run
                AND channel = $channel AND batch_seq = $seq AND kafka_topic_id = $topic""",
            {
                "run": head["run_id"], "channel": batches[-1]["channel"],
                "seq": batches[-1]["batch_seq"], "topic": batches[-1]["kafka_topic_id"],
            },
        )  # fmt: skip
    else:
        found = lake.rows(
            "SELECT weights FROM policies WHERE run_id = $run AND channel = $channel",
            {"run": head["run_id"], "channel": head["channel"]},
        )
    return dict(found[0]["weights"] or {}) if found else None


def state(lake: Lake, run_id: str, key: str) -> str:
    """Return what differs after each change of an open trajectory: its calls, and its closing."""
    found = lake.rows(
        """SELECT (SELECT count(*) FROM calls WHERE run_id = $run AND trajectory_key = $key) || '-'
            || (SELECT coalesce(sum(revision + 1), 0) FROM closed
                WHERE run_id = $run AND trajectory_key = $key) AS state""",
        {"run": run_id, "key": key},
    )
    return str(found[0]["state"])


def page_of(steps: Sequence[Row], first: int | None, is_open: bool) -> tuple[list[Row], list[Row]]:
    """Return the steps of a page, and the earlier ones that they may continue.

    Args:
        steps: all of the trajectory.
        first: index of the first step of the page; None: the page of the newest steps of an open
            trajectory, else the first page.
    """
    if first is None:
        first = max(0, len(steps) - 1) // PAGE * PAGE if is_open else 0
    page = [step for step in steps if step["index"] >= first][:PAGE]
    parents = {step["parent"] for step in page} | {first - 1}
    return page, [step for step in steps if step["index"] < first and step["index"] in parents]


def with_bodies(lake: Lake, run_id: str, steps: Sequence[Row]) -> Iterator[Row]:
    """Yield steps with their request and response, a few in memory at once."""
    for some in batched(steps, _AT_ONCE):
        ids = [step["step_id"] for step in some]
        rows = recorded(lake, run_id, [log_times(some)], ids, _BODIES)
        bodies = {row["step_id"]: row for row in rows}
        empty = {"request_json": None, "response_json": None}
        yield from (step | bodies.get(step["step_id"], empty) for step in some)


def batched(steps: Sequence[Row], size: int) -> Iterator[Sequence[Row]]:
    """Yield parts of a sequence, each of at most this size."""
    yield from (steps[at : at + size] for at in range(0, len(steps), size))


def log_times(steps: Iterable[Row]) -> Row:
    """Return the log times of the first and last step, as `recorded` takes them."""
    times = [step["kafka_timestamp"] for step in steps]
    return {"opened_at": min(times), "closed_at": max(times)}


def recorded(
    lake: Lake, run_id: str, heads: Sequence[Row], step_ids: Sequence[str], columns: str
) -> list[Row]:
    """Return recorded steps in log order, reading only row groups of the trajectories' time.

    Args:
        heads: with `opened_at` and `closed_at`, the log times.
        columns: the fewer, the less is read.
    """
    if not step_ids:
        return []
    return lake.rows(
        f"""SELECT {columns} FROM steps_raw WHERE run_id = $run AND step_id IN $ids
            AND kafka_timestamp BETWEEN timezone('UTC', $first::TIMESTAMP) - {_SKEW}
                AND timezone('UTC', $last::TIMESTAMP) + {_SKEW}
        ORDER BY kafka_partition, kafka_offset""",
        {
            "run": run_id, "ids": list(step_ids), "first": min(h["opened_at"] for h in heads),
            "last": max(h["closed_at"] for h in heads),
        },
    )  # fmt: skip


def _with_lanes(steps: list[Row]) -> list[Row]:
    """Give each step its lane in the drawing of the prefix tree: a fork begins a new one."""
    lanes: dict[int, int] = {}
    continued: set[int] = set()
    used = -1
    for step in steps:
        parent = step["parent"]
        if parent in lanes and parent not in continued:
            lane = lanes[parent]
            continued.add(parent)
        else:
            used += 1
            lane = used
        lanes[step["index"]] = step["lane"] = lane
    return steps


def _trained_versions(lake: Lake, who: Row, decisions: Iterable[Row]) -> list[Row]:
    admitted = [d for d in decisions if d["admitted"]]
    if not admitted:
        return []
    return lake.rows(
        """SELECT v.version_id, parent_version, sync_index, surviving, published_at, metrics,
            trained_steps, untrained
        FROM lineage_versions v LEFT JOIN trained t ON t.version_id = v.version_id
            AND t.run_id = v.run_id AND t.trajectory_id = $id
        WHERE v.run_id = $run AND channel = $channel AND batches_topic_id = $topic
            AND $seq BETWEEN first_batch_seq AND last_batch_seq ORDER BY published_at""",
        {
            **who, "channel": admitted[-1]["channel"],
            "topic": admitted[-1]["kafka_topic_id"], "seq": admitted[-1]["batch_seq"],
        },
    )  # fmt: skip


def counting(versions: Sequence[Row]) -> Row | None:
    """Return the version that counts of those of a batch: the surviving one."""
    return max(versions, key=lambda v: (v["surviving"], v["published_at"]), default=None)


def _with_reasons(steps: Iterable[Row], versions: Sequence[Row]) -> list[Row]:
    """Return the steps, with the trainer's reason in each step that it left out."""
    version = counting(versions) or {}
    reasons = {left["step_id"]: left["reason"] for left in version.get("untrained") or ()}
    return [
        step | {"trainable": False, "untrainable_reason": reasons[step["step_id"]]}
        if step["step_id"] in reasons
        else step
        for step in steps
    ]


def _findings(lake: Lake, head: Row) -> list[Row]:
    """Return the findings of quality rules, of the assessment that counts."""
    return lake.rows(
        """SELECT f.rule, f.step_id, f.score, f.evidence FROM (
            SELECT unnest(findings) AS f FROM assessments_raw
            WHERE run_id = $run AND trajectory_id = $id
            QUALIFY rank() OVER (ORDER BY assessment_revision DESC) = 1)""",
        {"run": head["run_id"], "id": head["trajectory_id"]},
    )


def timeline(found: Trajectory) -> list[Moment]:
    """Return what happened to a trajectory, in order of time."""
    head = found.head
    moments: list[tuple[Any, str, str, int | None]] = []
    for step in found.steps:
        index = step["index"]
        moments.append((step["received_at"], "gateway", f"step {index}: request", index))
        moments.append((step["finished_at"], "gateway", f"step {index}: last token", index))
        where = f"{step['kafka_partition']}:{step['kafka_offset']}"
        on_log = f"step {index} on claw.steps, {where}"
        moments.append((step["kafka_timestamp"], "Kafka", on_log, index))
    for failed in found.failures:
        moments.append((failed["received_at"], "gateway", f"failed: {failed['reason']}", None))
    if not found.is_open:
        moments.append((head["closed_at"], "assemble", f"closed: {head['outcome']}", None))
        moments.append((head["assembled_at"], "assemble", "payload on claw.trajectories", None))
        revision = f"revision {head['revision']} is in the lake"
        moments.append((head["kafka_timestamp"], "lake", revision, None))
    for d in found.decisions:
        what = f"in batch {d['batch_seq']} of {d['channel']}" if d["admitted"] else d["reason"]
        moments.append((d["kafka_timestamp"], "admit", what, None))
    for v in found.versions:
        lost, name = "" if v["surviving"] else " (not on the surviving chain)", v["version_id"]
        none = v["trained_steps"] == 0
        what = f"no step was trained into {name}" if none else f"trained into {name}"
        moments.append((v["published_at"], "trainer", what + lost, None))
    known = sorted((m for m in moments if m[0] is not None), key=lambda m: m[0])
    return [Moment(*m, (m[0] - known[0][0]).total_seconds()) for m in known]


def main_moments(moments: Sequence[Moment]) -> list[Moment]:
    """Return the moments of the whole trajectory, the first one, and the last one of each place."""
    last = {m.where: m for m in moments if m.step is not None}
    return [m for m in moments if m.step is None or m in (moments[0], last[m.where])]


def moments_of(moments: Sequence[Moment], page: Sequence[Row]) -> list[Moment]:
    """Return the moments of the whole trajectory and those of the steps of a page."""
    indexes = {step["index"] for step in page} | {None}
    return [m for m in moments if m.step in indexes]


def placed(
    failures: Sequence[Row], page: Sequence[Row], steps: Sequence[Row]
) -> dict[int | None, list[Row]]:
    """Return the failed calls in the time of a page, by the step that they precede.

    None: they are after the steps of the page.
    """
    first, last = (page[0]["index"], page[-1]["index"]) if page else (0, -1)
    earlier = [s["received_at"] for s in steps if s["index"] < first and s["received_at"]]
    later = [s["received_at"] for s in steps if s["index"] > last and s["received_at"]]
    found: dict[int | None, list[Row]] = {}
    for failed in failures:
        at = failed["received_at"]
        if (earlier and at <= max(earlier)) or (later and at > min(later)):
            continue
        after = (s["index"] for s in page if s["received_at"] and s["received_at"] > at)
        found.setdefault(next(after, None), []).append(failed)
    return found


def spans(steps: Sequence[Row]) -> list[Span | None]:
    """Return when each step was called and for how long; None if its times are not known."""
    times = [(s["received_at"], s["finished_at"]) for s in steps]
    known = [(a, b) for a, b in times if a is not None and b is not None]
    if not known:
        return [None] * len(steps)
    began = min(a for a, _ in known)
    whole = (max(b for _, b in known) - began).total_seconds() or 1.0
    return [
        None if a is None or b is None
        else Span(
            (b - a).total_seconds(),
            100 * (a - began).total_seconds() / whole,
            100 * (b - a).total_seconds() / whole,
        )
        for a, b in times
    ]  # fmt: skip
