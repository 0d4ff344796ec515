"""Generated logs for the interleaving properties, and a partition of assemble that can be killed.

The kill happens between any two steps of assemble's protocol. A seed generates a whole log. The
failures occur in long logs with many simultaneous events, so the logs are not generated event by
event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from support.assemble import (
    ANONYMOUS_KEY,
    CODEC,
    chat_step,
    curation,
    reward,
    session,
    step,
)

from clawstream.schemas.ids import agent_key
from clawstream.schemas.records import (
    AssemblyMarker,
    Candidate,
    Curation,
    Reward,
    SessionEvent,
    Step,
    Tick,
    Trajectory,
)
from clawstream.schemas.records.rewards import COMPLETION_NAME
from clawstream.schemas.records.trajectory_parts import joined
from clawstream.schemas.topics import partition_of
from clawstream.stream_jobs.assemble import changelog
from clawstream.stream_jobs.assemble.changelog import ChangelogReader
from clawstream.stream_jobs.assemble.fold import AssemblyFold
from clawstream.stream_jobs.assemble.limits import Limits
from clawstream.stream_jobs.assemble.output_records import assembled, candidate
from clawstream.stream_jobs.assemble.payload.cache import CachedPayload, payload_of
from clawstream.stream_jobs.assemble.payload.trainability import trainability
from clawstream.stream_jobs.assemble.state.changes import OutputsAcknowledged, PayloadWritten
from clawstream.stream_jobs.assemble.state.trajectories import (
    REWARDS,
    STEPS,
    RunTrajectory,
    SourceTopic,
)

AGENT = agent_key("codex", b"", "s")
LIMITS = Limits(
    trajectory_timeout=3000, closed_horizon=10_000_000, orphan_after=800, closed_max=10_000,
    anonymous_inactivity=900, agent_inactivity=1500,
)  # fmt: skip
WITH_REWARD = "with reward"
"""Reason of the ends that carry a reward."""
Log = list[tuple[int, Any]]
"""(timestamp, event) of each offset."""
Logs = tuple[Log, Log]
"""The logs of one partition of `claw.steps` and of `claw.rewards`."""


class Killed(Exception):
    """The process ended within an operation."""


@dataclass
class Rig:
    """The owner of one partition without Kafka.

    Only its sent records and its changelog survive a kill.
    """

    logs: Logs
    limits: Limits = LIMITS
    log: list[bytes] = field(default_factory=list)
    trimmed: int = 0
    trajectories: dict[RunTrajectory, Trajectory] = field(default_factory=dict)
    revisions: dict[RunTrajectory, dict[int, Candidate]] = field(default_factory=dict)
    sent: list[Candidate] = field(default_factory=list)
    marks: set[tuple[RunTrajectory, str, str, int]] = field(default_factory=set)
    dead_letters: set[tuple[SourceTopic, int, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.take_over()

    def take_over(self) -> None:
        """Start a new owner: write the marker, restore the state, send the unsent outputs."""
        self.log.append(
            CODEC.encode(
                AssemblyMarker(worker="w", steps_topic_id="s", rewards_topic_id="r", created_at=0)
            )
        )
        self.epoch = len(self.log) - 1
        read = ChangelogReader()
        for offset in range(self.trimmed, len(self.log)):
            read.read(offset, CODEC.decode(self.log[offset]), len(self.log[offset]))
        self.state, self.seq, self.unflushed = read.state, read.seq, list[Any]()
        self.fold = AssemblyFold(self.state, self.limits)
        self.payload: dict[int, CachedPayload] = {}
        self.emit(None)

    def left(self, source: SourceTopic) -> int:
        """Return the number of unread records."""
        return len(self.logs[source]) - self.state.applied[source] - 1

    def read(self, source: SourceTopic) -> None:
        """Fold the next record."""
        offset = self.state.applied[source] + 1
        timestamp, event = self.logs[source][offset]
        key = None if isinstance(event, Tick) else event.trajectory_key.encode()
        kept = self.fold.record(source, offset, timestamp, key, event)
        if kept is not None:
            self.payload[offset] = kept

    def delta(self) -> bytes | None:
        """Return the record that makes the batch durable; None when the batch decided nothing."""
        entries = self.fold.finish_batch()
        if not entries and not self.unflushed:
            return None
        self.seq += 1
        return CODEC.encode(
            changelog.delta(self.epoch, self.seq, self.state, [*self.unflushed, *entries])
        )

    def emit(self, most: int | None) -> None:
        """Send the outputs that are decided but not sent.

        most: number of records before a kill.

        Raises:
            Killed: there are more than `most` records.
        """
        outputs, facts = list[Any](), []
        for key, trajectory in self.state.pending.closings.items():
            for s in trajectory.steps:
                if s.offset not in self.payload:
                    self.payload[s.offset] = self._again(s.offset)
            if trajectory.meta is not None:
                self.payload.setdefault(
                    trajectory.meta, self.logs[STEPS][trajectory.meta][1].metadata_json or b""
                )
            done = assembled(key, trajectory, self.state.closed[key], self.payload)
            outputs.append((self.trajectories, key, joined(done.parts)))
            facts.append(PayloadWritten(key, done.prompt_tokens, done.order, ("id", 0, 0, 0)))
            facts[-1].apply(self.state)
        for key in self.state.pending.revised:
            made, _ = candidate(key, self.state.closed[key], CODEC)
            outputs.append((self.revisions.setdefault(key, {}), made.revision, made))
        for at, (where, name, value) in enumerate(outputs):
            if most is not None and at >= most:
                raise Killed
            assert where.setdefault(name, value) == value, "sent again with other content"
            if isinstance(value, Candidate):
                self.sent.append(value)
        self.marks |= {(m.key, m.step_id, m.kind, m.offset) for m in self.state.pending.marks}
        self.dead_letters |= {
            (b.source, b.offset, b.reason) for b in self.state.pending.dead_letters
        }
        if self.state.pending:
            acknowledged = OutputsAcknowledged()
            acknowledged.apply(self.state)
            self.unflushed = [acknowledged, *facts]

    def _again(self, offset: int) -> CachedPayload:
        """Read the whole payload from `claw.steps` again, as a new owner does."""
        event = self.logs[STEPS][offset][1]
        return payload_of(event, trainability(event))

    def snapshot(self, whole: bool) -> None:
        """Write a snapshot and trim the changelog, or be killed before its last chunk."""
        pieces = [CODEC.encode(p) for p in changelog.snapshot(self.epoch, self.seq, self.state)]
        first = len(self.log)
        self.log += pieces if whole else pieces[:-1]
        if whole:
            self.unflushed = []
            self.trimmed = first

    def batch(self, size: int, rng: Random, prefers: float, ends: str) -> None:
        """Process a micro-batch. ends: the step of the protocol at which the owner is killed."""
        for _ in range(size):
            sources = [s for s in (STEPS, REWARDS) if self.left(s)]
            if sources:
                self.read(sources[0] if len(sources) == 1 or rng.random() < prefers else sources[1])
        delta = self.delta()
        if ends == "before delta":
            return self.take_over()
        if delta is not None and ends == "fenced":
            stale, self.unflushed = delta, []
            self.take_over()
            return self.log.append(stale)  # it is appended after the successor's marker
        if delta is not None:
            self.log.append(delta)
            self.unflushed = []
        try:
            self.emit(rng.randrange(3) if ends == "amid outputs" else None)
        except Killed:
            return self.take_over()
        if ends in ("snapshot", "half a snapshot"):
            self.snapshot(ends == "snapshot")
        if ends in ("after outputs", "half a snapshot", "amid outputs"):
            self.take_over()
        return None

    def last(self) -> dict[RunTrajectory, Candidate]:
        """Return the last revision of each trajectory, without its number."""
        return {
            key: replace(found[max(found)], revision=0) for key, found in self.revisions.items()
        }


ENDS = ("before delta", "fenced", "amid outputs", "after outputs", "snapshot", "half a snapshot")


def plainly(logs: Logs, limits: Limits = LIMITS) -> Rig:
    """Process all steps, then all rewards, one record at a time, without a fault."""
    rig, rng = Rig(logs, limits), Random(0)
    while rig.left(STEPS) or rig.left(REWARDS):
        rig.batch(1, rng, 1.0, "")
    return rig


def disturbed(logs: Logs, rng: Random, limits: Limits = LIMITS) -> Rig:
    """Process the logs with random interleaving, batches and kills."""
    rig = Rig(logs, limits)
    prefers, largest, calm = (
        rng.choice([0.02, 0.3, 0.5, 0.7, 0.98]),
        rng.choice([1, 4, 30]),
        rng.choice([0.3, 0.7, 0.95]),
    )
    kills = 0
    while rig.left(STEPS) or rig.left(REWARDS):
        ends = "" if rng.random() < calm or kills > 60 else rng.choice(ENDS)
        kills += bool(ends)
        rig.batch(rng.randint(1, largest), rng, prefers, ends)
    return rig


def with_gaps(logs: Logs, rng: Random, count: int) -> tuple[Logs, tuple[list[int], list[int]]]:
    """Insert ticks into the logs at positions that may also hold duplicates.

    Ticks and duplicates only advance time. Returns the logs and the positions.
    """
    out: tuple[Log, Log] = ([], [])
    gaps: tuple[list[int], list[int]] = ([], [])
    for source in (STEPS, REWARDS):
        log = logs[source]
        behind = sorted(rng.choices(range(1, len(log) + 1), k=count)) if log else []
        for i, record in enumerate(log, 1):
            out[source].append(record)
            while behind and behind[0] == i:
                behind.pop(0)
                gaps[source].append(len(out[source]))
                soonest = out[source][-1][0]
                latest = log[i][0] if i < len(log) else soonest
                out[source].append((rng.randint(soonest, latest), Tick(partition=0)))
    return out, gaps


def duplicated(
    logs: Logs, gaps: tuple[list[int], list[int]], never: set[tuple[SourceTopic, int]], rng: Random
) -> Logs:
    """Replace some of the gaps by copies of earlier records.

    never: dead-lettered records; they are not copied, because a later copy may find its target.
    """
    out: Logs = (list(logs[0]), list(logs[1]))
    for source in (STEPS, REWARDS):
        for at in gaps[source]:
            known = [i for i in range(at) if (source, i) not in never and i not in gaps[source]]
            if known and rng.random() < 0.9:
                recent = known[-4:] if rng.random() < 0.3 else known
                out[source][at] = (logs[source][at][0], logs[source][rng.choice(recent)][1])
    return out


# ---------------------------------------------------------------- stories


class Story:
    """Write the two logs of a partition, with events that arrive later than they were made.

    whole: every call has tokens, and no event makes it untrainable.
    """

    def __init__(self, rng: Random, runs: Sequence[str] = ("r", "s"), whole: bool = False) -> None:
        self.rng, self.runs, self.whole, self.now, self.count = rng, runs, whole, 0, 0
        self._events: tuple[list[tuple[int, int, Any]], list[tuple[int, int, Any]]] = ([], [])
        self.said: dict[RunTrajectory, list[tuple[int, list[Any], list[Any]]]] = {}
        """For each run and key, a list of calls: number, prompt (or messages), and reply."""

    def put(self, event: Any, delay: int = 0) -> None:
        """Append the event to its log `delay` ms from now, but not before time 0."""
        self.count += 1
        source = REWARDS if isinstance(event, Reward | Curation) else STEPS
        self._events[source].append((max(0, self.now + delay), self.count, event))

    def logs(self, quiet: int) -> Logs:
        """Return both logs, each ending with ticks after `quiet` ms without events."""
        out: Logs = ([], [])
        for source in (STEPS, REWARDS):
            out[source].extend(
                (at, event) for at, _, event in sorted(self._events[source], key=lambda e: e[:2])
            )
        end = max((log[-1][0] for log in out if log), default=0)
        for log in out:
            log += [(end + quiet, Tick(partition=0)), (end + 2 * quiet, Tick(partition=0))]
        return out

    def call(self, run: str, key: str, delay: int = 0, **more: Any) -> int:
        """Write one call with its choices and return its number.

        The call continues an earlier one, forks, starts a new conversation, or retries.
        """
        rng, said = self.rng, self.said.setdefault((run, key), [])
        n = len(said)
        more = {"run_id": run, "version_first": f"{run}/3.0", "version_last": f"{run}/3.0", **more}
        how = rng.choice(["on", "on", "on", "on", "fork", "new", "again"]) if said else "new"
        _, asked, answered = rng.choice(said[-2:]) if said else (0, [], [])
        make = self._spoken if key == ANONYMOUS_KEY else self._plain
        if how == "again":
            more |= rng.choice([{"retry_count": 1}, {"idempotency_key": "i"}, {}])
        elif rng.random() < 0.2:
            more["idempotency_key"] = rng.choice(["i", f"i{n}"])
        if rng.random() < 0.15 and not self.whole:
            more["status"] = rng.choice(["aborted", "error"])
        first, asked, answered = make(key, n, how, asked, answered, more)
        said.append((n, asked, answered))
        for i in range(rng.choice([1, 1, 1, 2])):
            twin = replace(first, step_id=f"{first.call_id}.{i}", choice_index=i)
            self.put(twin, delay + (rng.choice([0, 0, 300]) if i else 0))
        return n

    def _plain(
        self,
        key: str,
        n: int,
        how: str,
        asked: list[Any],
        answered: list[Any],
        more: dict[str, Any],
    ) -> tuple[Step, list[Any], list[Any]]:
        rng = self.rng
        prompt = {"on": [*asked, *answered, 2], "fork": [*asked, 7], "new": [1], "again": asked}[
            how
        ]
        response = [n + 10] if rng.random() < 0.8 else [10]
        if rng.random() < 0.1 and not self.whole:
            more = {"prompt_token_ids": None, **more}
        return step(key, n, prompt, response, **more), prompt, response

    def _spoken(
        self,
        key: str,
        n: int,
        how: str,
        asked: list[Any],
        answered: list[Any],
        more: dict[str, Any],
    ) -> tuple[Step, list[Any], list[Any]]:
        rng = self.rng
        turn = {"role": "user", "content": rng.choice("xy")}
        messages = {
            "on": [*asked, *answered, turn], "fork": [*asked, turn],
            "new": [{"role": "user", "content": "q"}], "again": asked,
        }[how]  # fmt: skip
        reply: dict[str, Any] = {"content": rng.choice(["so", "so", f"so {n}"])}
        if rng.random() < 0.3:
            made = {"name": "look", "arguments": rng.choice(['{"a": 1}', '{"a": 2}'])}
            reply = {"tool_calls": [{"id": rng.choice(["call_1", f"call_{n}"]), "function": made}]}
        made_step = chat_step(
            n, messages, reply, key, tokens=self.whole or rng.random() < 0.85, **more
        )
        return made_step, list(messages), [{"role": "assistant", **reply}]

    def judged(self, run: str, key: str, when: int, values: Sequence[float | None]) -> None:
        """Write rewards or marks for a call, for its trajectory, or for a missing target."""
        rng, said = self.rng, self.said.get((run, key), [])
        n = (
            rng.randrange(len(said) + 1)
            if rng.random() < 0.1 or not said
            else rng.randrange(len(said))
        )
        choice = rng.choice(["0", "0", "0", "1"])
        target = {"step_id": f"{key}~C{n}.{choice}"}
        unnamed = key in (ANONYMOUS_KEY, AGENT)
        about = rng.choice(["step", "whole", "whole"])
        if about == "whole":
            target = (
                rng.choice([target | {"trajectory_id": key}, {"trajectory_id": f"{key}~C{n}"}])
                if unnamed
                else {}
            )
        if rng.random() < 0.6:
            made: Any = replace(
                reward(key, rng.choice(values), None, rng.choice("ab"), rng.randint(0, 2)),
                source=rng.choice(["env", "human"]),
            )
        else:
            marks: list[dict[str, Any]] = [
                {"quality": rng.choice([0.2, 0.9])}, {"tags": (rng.choice("uv"),)},
                {"trainable": True}, {"trainable": self.whole},
            ]  # fmt: skip
            made = curation(key, "", None, **rng.choice(marks))
        self.put(replace(made, run_id=run, event_id=f"e{self.count}", **target), when)

    def ended(self, run: str, end: SessionEvent, delay: int = 0) -> None:
        """Write an end: half of them with a reward, which also comes on `claw.rewards` then."""
        rng, key = self.rng, end.trajectory_key
        if rng.random() < 0.5:
            own = reward(key, rng.choice([0.0, 0.5, 1.0]), name=COMPLETION_NAME)
            end = replace(end, rewards={COMPLETION_NAME: own.value}, reason=WITH_REWARD)
            if end.step_id is not None:
                own = replace(own, step_id=end.step_id, trajectory_id=key)
            own = replace(own, run_id=run, event_id=f"e{self.count}")
            self.put(own, delay + rng.choice([-300, 0, 0, 100, 2500]))
        self.put(replace(end, run_id=run), delay)


def chaos(rng: Random, length: int) -> Logs:
    """Generate events in any order: late steps, ends before starts, rewards without a target."""
    story = Story(rng, rng.choice([("r",), ("r", "s")]))
    pace = rng.choice([[0, 1, 20], [0, 0, 5, 50, 200, 400], [0, 50, 400, 1000]])
    keys = rng.choice(
        [["a"], [ANONYMOUS_KEY], [AGENT], ["a", "b", ANONYMOUS_KEY, ANONYMOUS_KEY, AGENT]]
    )
    for _ in range(length):
        story.now += rng.choice(pace)
        run, key = rng.choice(story.runs), rng.choice(keys)
        kind = rng.choice(["call"] * 10 + ["judge"] * 10 + ["opened", "end", "tick"])
        delay = rng.choice([0, 0, 0, 0, 0, 0, 0, 0, 100, 700, 2500])
        if kind == "call":
            story.call(run, key, delay)
        elif kind == "judge":
            story.judged(
                run, key, rng.choice([-700, -100, -20, 0, 0, 20, 900, 3000]), [0.0, 0.5, 1.0, None]
            )
        elif kind == "tick":
            story.put(Tick(partition=0))
        elif kind == "opened":
            story.put(_opened(run, key if key in "ab" else "a", story.count, rng), delay)
        else:
            n = rng.randrange(len(story.said.get((run, key), [])) + 1)
            named = {} if key in "ab" else {"step_id": f"{key}~C{n}.0"}
            end = session(
                key, rng.choice(["completed", "failed", "abandoned"]), f"s{story.count}", **named
            )
            story.ended(run, end, delay)
    return story.logs(10_000)


def full_rounds(rng: Random) -> tuple[Logs, Logs]:
    """Generate two partitions on which every round of every group is full and rewarded in time."""
    stories = tuple(Story(rng, whole=True) for _ in range(2))
    left: list[tuple[str, str, list[str], SessionEvent]] = []
    for run in ("r", "s"):
        for group in range(rng.randint(1, 3)):
            size, counted = rng.choice([1, 2, 3]), rng.random() < 0.5
            for number in range(rng.choice([1, 1, 2])):
                said = {
                    "group_id": f"g{group}",
                    "group_size": size,
                    "round": None if counted else number,
                }
                for member in range(size):
                    key = f"k{group}-{number}-{member}"
                    script = ["call"] * rng.randint(1, 4)
                    script.insert(rng.randint(0, len(script)), "opened")
                    script += ["end"] + ["late"] * rng.choice([0, 0, 1])
                    left.append(
                        (
                            run,
                            key,
                            script,
                            replace(session(key, "opened", f"{run}{key}", **said), run_id=run),
                        )
                    )
    pace = rng.choice([[0, 1, 20], [0, 5, 50, 200], [50, 300, 700]])
    while left:
        for story in stories:
            story.now += rng.choice(pace)
        run, key, script, opened = rng.choice(left)
        story, what = stories[partition_of(key.encode(), 2)], script.pop(0)
        if what == "opened":
            story.put(opened)
        elif what == "end":
            story.ended(run, session(key, rng.choice(["completed", "failed"]), f"{run}{key}-end"))
            _rewarded(story, run, key, {})
        else:
            story.call(run, key)
        if rng.random() < 0.5:
            story.judged(run, key, rng.choice([-1000, 0, 2000]), [0.0, 1.0])
        if rng.random() < 0.3:
            unnamed = rng.choice([ANONYMOUS_KEY, AGENT])
            other = stories[partition_of(unnamed.encode(), 2)]
            n = other.call(run, unnamed)
            _rewarded(
                other, run, unnamed, {"trajectory_id": unnamed, "step_id": f"{unnamed}~C{n}.0"}
            )
        if not script:
            left.remove((run, key, script, opened))
    return stories[0].logs(10_000), stories[1].logs(10_000)


def _rewarded(story: Story, run: str, key: str, target: dict[str, Any]) -> None:
    """Write the reward that every trajectory must have."""
    made = reward(key, story.rng.choice([0.0, 1.0]))
    story.put(
        replace(made, run_id=run, event_id=f"e{story.count}", **target),
        story.rng.choice([-2000, -100, 0, 100, 4000]),
    )


def _opened(run: str, key: str, number: int, rng: Random) -> SessionEvent:
    what: dict[str, Any] = {
        "group_id": rng.choice([None, "g", "h"]), "group_size": rng.choice([None, 2]),
        "round": rng.choice([None, 1]), "metadata_json": rng.choice([None, b"{}", b'{"n":1}']),
        "channel": rng.choice([None, "val"]),
    }  # fmt: skip
    return replace(session(key, "opened", f"o{number}", **what), run_id=run)
