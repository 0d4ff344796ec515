"""Delete what no run needs from topics without retention by time (`clawstream topics trim`).

Trims candidates, ready batches and, if requested by time, rewards. In each partition the records up
to the lowest of these bounds are deleted:

    all               what every table of the lake has; `before`, log time
    ready batches     of a run that is over (ended, decided and read by its admission): what its
                      trainer has trained and published, up to its newest checkpoint
    candidates        the first record of each run that is not over, and the last Tick of each
                      source partition before it: a new reader there must know event time
    rewards           what assemble has applied; the first record that the steps still have, less
                      the time that a reward waits for its step, because a replay joins them again

A journal that does not begin at 0 belongs to a run that is over: its admission does not start
again. So the candidates of an ended run are trimmed once each of its journals has been, and
journals go first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from clawstream.ops.topics.run_survey import JournalSummary, RunSummary, RunSurvey
from clawstream.runtime.errors import PlumbingError
from clawstream.runtime.kafka import Cluster
from clawstream.runtime.topics.event_time import first_tick_needed
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.settings import Settings
from clawstream.text_table import text_table

CLOCKS_APART_MS = 60_000
"""Largest difference between the clocks of two brokers: each stamps the partitions it leads."""

At = tuple[str, int]
"""Topic and partition."""


class NotGivenUp(PlumbingError):
    """A run cannot be given up: it is live or does not exist."""


class TrimOvertaken(PlumbingError):
    """A topic was recreated since the plan was made, so its offsets are invalid. Begin again."""


class Bound(NamedTuple):
    """Records from offset `at` on must stay. why: The reason."""

    at: int
    why: str


@dataclass(frozen=True, slots=True)
class TrimRange:
    """One partition: [low, to) is deleted, [to, end) stays. why: What holds the rest, or empty."""

    topic: str
    partition: int
    low: int
    to: int
    end: int
    why: str = ""

    @property
    def removes(self) -> int:
        """Offsets to delete; control records and Ticks count."""
        return self.to - self.low


@dataclass(frozen=True, slots=True)
class TrimInputs:
    """Input from other processes.

    in_lake, applied: Offsets below which the lake has all records and assemble has applied all
    rewards; default 0. before_ms: Only delete records before this log time. given_up: Runs whose
    rest is abandoned. resumes: Ready-batches topic to the offset from which the newest checkpoint
    that is seen here goes on.
    """

    in_lake: Mapping[At, int]
    applied: Mapping[int, int] = field(default_factory=dict)
    before_ms: int | None = None
    given_up: Collection[str] = ()
    resumes: Mapping[str, int] = field(default_factory=dict)


# -- the bounds, pure


def trim_range(
    topic: str, partition: int, ends: tuple[int, int], bounds: Iterable[Bound]
) -> TrimRange:
    """Return the range below the lowest bound; `why` names every bound that is as low."""
    low, end = ends
    known = [Bound(max(low, min(b.at, end)), b.why) for b in bounds]
    to = min((b.at for b in known), default=end)
    why = "; ".join(dict.fromkeys(b.why for b in known if b.at == to)) if to < end else ""
    return TrimRange(topic, partition, low, to, end, why)


def needs(
    run: str,
    summary: RunSummary | None,
    journals: Sequence[JournalSummary],
    given_up: Collection[str],
) -> str | None:
    """Return why a run still needs all its records; None: it is over. journals: Of its channels."""
    if summary is not None and summary.has_policy and summary.ended is None:
        return f"run {run} lives"
    if run in given_up:
        return None
    if summary is not None and summary.ended is not None:
        unread = next(
            (why for j in journals if (why := _unread_end(j, summary.ended)) is not None), None
        )
        if unread is None and summary.has_policy and not any(j.end for j in journals):
            return (
                f"run {run} has ended at {summary.ended}, but no decisions of it are seen "
                f"(--give-up {run})"
            )
        return unread
    if any(j.low > 0 for j in journals):
        return None
    if summary is None:
        return f"nothing on the candidates says that run {run} has ended (--give-up {run})"
    return f"run {run} has no policy yet (--give-up {run})"


def _unread_end(journal: JournalSummary, ended: int) -> str | None:
    if journal.low > 0 or journal.unreadable is not None or journal.seen > ended:
        return None
    name = f"{journal.run_id} ({journal.channel})"
    return (
        f"run {journal.run_id} has ended at {ended}, but the admission of {name} has read to "
        f"{journal.seen}: start it "
        f"(or --give-up {journal.run_id})"
    )


def journal_bounds(
    journal: JournalSummary,
    need: str | None,
    given_up: Collection[str],
    resumes: int | None = None,
) -> Iterator[Bound]:
    """Yield the bounds of the ready batches of a run.

    Args:
        journal: its batches.
        need: why the run needs all of them.
        given_up: runs whose rest is abandoned.
        resumes: offset from which the newest checkpoint of its trainer goes on; None: unknown.
    """
    run = journal.run_id
    if need is not None:
        yield Bound(journal.low, need)
        return
    if run in given_up:
        return
    if resumes is not None and resumes < journal.trained:
        yield Bound(
            resumes,
            f"the newest checkpoint of run {run} goes on there: start its trainer once, which "
            f"publishes the rest (or --give-up {run})",
        )
    if journal.unreadable is not None:
        yield Bound(journal.low, f"{journal.unreadable} (--give-up {run})")
    elif journal.untrained:
        yield Bound(
            journal.trained,
            f"{journal.untrained} batches of run {run} are not trained (--give-up {run})",
        )
    elif journal.trained == 0 and journal.end > 0:
        yield Bound(0, f"the trainer of run {run} has begun, but trained nothing (--give-up {run})")
    else:
        yield Bound(journal.trained, f"the trainer of run {run} stands there")


def rewards_before_steps(steps_ms: Iterable[int], orphan_after_s: float) -> int:
    """Return the earliest log time of rewards for these steps: rewards may precede their step.

    Includes the clock difference of brokers.
    """
    return max(0, min(steps_ms) - round(orphan_after_s * 1000) - CLOCKS_APART_MS)


def run_bound(
    run: str, summary: RunSummary, need: str | None, ranges: Iterable[TrimRange]
) -> Bound | None:
    """Return the bound of a run on the candidates.

    need: Why it needs all. ranges: Of its journals.
    """
    held = next((c for c in ranges if c.to == 0 and c.end > 0), None)
    if need is None and held is None:
        return None
    if held is not None and need is None:
        need = f"run {run} has ended, but {held.topic} stays: {held.why}"
    return Bound(summary.first, f"{need}, since offset {summary.first}")


# -- the plan


class TopicTrim:
    """A trim plan, computed at construction and executed by `do`."""

    def __init__(self, cluster: Cluster, settings: Settings, kept: TrimInputs) -> None:
        """Make the plan. Raises NotGivenUp; KafkaError when a required topic is not listed."""
        self._cluster, self._topics, self._kept = cluster, settings.kafka.topics, kept
        self._orphan_after_s = settings.jobs.orphan_after_s
        self._decoder = Decoder(cluster, self._topics.schemas)
        self._survey = RunSurvey(cluster, self._topics, self._decoder)
        self._ids = self._survey.ids
        self._check_given_up()
        self._before = {
            t: self._came_before(t) for t in (self._topics.candidates, *self._survey.journals)
        }
        self._journal_ranges: dict[str, list[TrimRange]] = {}
        self._needs: dict[str, str | None] = {}
        self._trim_journals()
        journals = [c for ranges in self._journal_ranges.values() for c in ranges]
        candidates = [
            self._candidates(p) for p in sorted(self._survey.ends[self._topics.candidates])
        ]
        self.ranges: list[TrimRange] = [*journals, *candidates, *self._rewards()]
        """In the order in which they must be executed."""

    def do(self) -> None:
        """Delete the records. After a KafkaError, the next plan continues. Raises TrimOvertaken."""
        todo = [c for c in self.ranges if c.removes]
        today = self._cluster.topic_ids(sorted({c.topic for c in todo}))
        for topic, topic_id in today.items():
            if topic_id != self._ids[topic]:
                raise TrimOvertaken(
                    f"{topic} was recreated meanwhile: nothing was removed, make another plan"
                )
        for c in todo:
            self._cluster.delete_records(c.topic, c.partition, c.to)

    def _check_given_up(self) -> None:
        for run in sorted(self._kept.given_up):
            summary = self._survey.runs.get(run)
            if summary is None and not any(r == run for r, _ in self._survey.journals.values()):
                raise NotGivenUp(f"there is nothing of run {run}")
            if summary is not None and summary.has_policy and summary.ended is None:
                raise NotGivenUp(f"run {run} lives: end it first, clawstream run end {run} --yes")

    def _came_before(self, topic: str) -> Mapping[int, int]:
        if self._kept.before_ms is None:
            return {}
        return self._cluster.offsets_at(topic, self._kept.before_ms)

    def _shared_bounds(self, topic: str, partition: int) -> Iterator[Bound]:
        held = self._kept.in_lake.get((topic, partition), 0)
        yield Bound(held, f"the lake has it up to {held}")
        if self._kept.before_ms is not None:
            at = self._before.get(topic, {}).get(partition, 0)
            yield Bound(at, "what came later is not asked for (--before)")

    def _trim_journals(self) -> None:
        survey, kept = self._survey, self._kept
        of_run: dict[str, list[str]] = {}
        for topic, (run, _) in survey.journals.items():
            of_run.setdefault(run, []).append(topic)
        for run in sorted({*survey.runs, *of_run}):
            summary, topics = survey.runs.get(run), of_run.get(run, [])
            alive = summary is not None and summary.has_policy and summary.ended is None
            journals = [survey.journal(t, not alive) for t in topics]
            need = self._needs[run] = needs(run, summary, journals, kept.given_up)
            self._journal_ranges[run] = []
            for j in journals:
                resumes = kept.resumes.get(j.topic)
                bounds = [
                    *journal_bounds(j, need, kept.given_up, resumes),
                    *self._shared_bounds(j.topic, 0),
                ]
                self._journal_ranges[run].append(trim_range(j.topic, 0, (j.low, j.end), bounds))

    def _candidates(self, partition: int) -> TrimRange:
        topic, survey = self._topics.candidates, self._survey
        bounds = list(self._shared_bounds(topic, partition))
        for run, summary in survey.runs.items():
            if summary.partition == partition:
                bound = run_bound(run, summary, self._needs[run], self._journal_ranges[run])
                bounds += [] if bound is None else [bound]
        ends = survey.ends[topic][partition]
        found = trim_range(topic, partition, ends, bounds)
        tickers = survey.there[self._topics.steps]
        first = first_tick_needed(
            self._cluster, self._decoder, (topic, partition), found.low, found.to, tickers
        )
        if first == found.to:
            return found
        reason = (
            f"{found.why or 'the next reader'}; the Ticks before {found.to} tell the time there"
        )
        return trim_range(topic, partition, ends, [Bound(first, reason)])

    def _rewards(self) -> Iterator[TrimRange]:
        """Yield rewards to trim, by time only: a replay of older steps may need a reward."""
        topic, kept = self._topics.rewards, self._kept
        if kept.before_ms is None or topic not in self._survey.there:
            return
        steps, firsts = self._topics.steps, dict[int, int]()
        for partition in range(self._survey.there[steps]):
            record = next(iter(self._cluster.read_all(steps, partition)), None)
            if record is not None:
                firsts[partition] = record.timestamp_ms
        ends = self._cluster.watermarks(topic)
        self._before |= {topic: self._cluster.offsets_at(topic, kept.before_ms)}
        since = rewards_before_steps(firsts.values(), self._orphan_after_s) if firsts else 0
        by_steps = self._cluster.offsets_at(topic, since)
        for partition, pair in sorted(ends.items()):
            bounds = list(self._shared_bounds(topic, partition))
            applied = kept.applied.get(partition, 0)
            bounds.append(Bound(applied, f"assemble has applied it up to {applied}"))
            if partition in firsts:
                bounds.append(Bound(by_steps.get(partition, 0), f"{steps} has steps since then"))
            else:
                bounds.append(
                    Bound(
                        pair[0],
                        f"{steps}-{partition} is empty: it can't be told which steps are gone",
                    )
                )
            yield trim_range(topic, partition, pair, bounds)


def format_ranges(ranges: Sequence[TrimRange]) -> str:
    """Return a table with a line for each partition that has records."""
    head = ("TOPIC", "PARTITION", "START", "GOES TO", "END", "HELD BY")
    body = (
        (c.topic, c.partition, c.low, c.to if c.removes else "-", c.end, c.why)
        for c in ranges
        if c.end > c.low
    )
    return text_table(head, body, right=range(1, 5))
