"""Compare every stored position with the current topics: `clawstream status --positions`.

Reads only. A position belongs to one topic id. Each package lists its own positions
(`positions(settings, cluster)`); this module diagnoses them.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from clawstream.runtime.kafka import Cluster
from clawstream.runtime.topics.positions import StoredPosition
from clawstream.schemas.settings import Settings
from clawstream.text_table import text_table

Verdict = Literal[
    "ok", "topic recreated", "topic is gone", "beyond the end", "before the start", "unreadable"
]
POSITIONS = (
    "clawstream.stream_jobs.lake.positions",
    "clawstream.ops.job_positions",
    "clawstream.trainer.positions",
)
"""Modules that list the stored positions of their processes; each needs other libraries."""
SERIOUS: Collection[Verdict] = ("beyond the end", "before the start", "unreadable")
"""With these the process stops (exit code 79) until someone decides."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A position and the current topic.

    topic_id: The current id, None without such a topic. low, high: Its start and end offset.
    """

    position: StoredPosition
    topic_id: str | None
    low: int | None
    high: int | None
    verdict: Verdict

    @property
    def what(self) -> str:
        """The verdict, with the position that it is about."""
        p = self.position
        return f"{self.verdict}: {p.process}, {p.place}, {p.topic}-{p.partition}"

    @property
    def to_do(self) -> str:
        """The action to take."""
        process, topic = self.position.process, self.position.topic
        lost = f"{topic} has lost records that {process} has"
        give_up = f"or give up: stop everything and delete {topic}; its next id is another one"
        return {
            "ok": "nothing",
            "topic recreated": f"nothing: {process} reads the new {topic} from its start; data of "
            "the old one stays",
            "topic is gone": f"nothing, if it was deleted on purpose: the next start creates "
            f"{topic} again",
            "beyond the end": f"{lost} read: restore its newer data, {give_up}",
            "before the start": f"{lost} not read: restore them, {give_up}",
            "unreadable": f"{self.position.error}: see 'When a position does not fit' in "
            "docs/operating.md",
        }[self.verdict]


def stored_positions(
    settings: Settings, cluster: Cluster
) -> tuple[list[StoredPosition], list[str]]:
    """Return the positions of all processes, and the libraries that are missing here for some."""
    found, missing = list[StoredPosition](), list[str]()
    for name in POSITIONS:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as e:
            if (e.name or "").partition(".")[0] == name.partition(".")[0]:
                raise
            missing.append(f"{name} left out: {e.name} is not installed here")
        else:
            found += module.positions(settings, cluster)
    return found, missing


def diagnose(
    position: StoredPosition,
    topic_ids: Mapping[str, str],
    ends: Mapping[tuple[str, int], tuple[int, int]],
) -> Diagnosis:
    """Compare a position with the current topics. Pure.

    Args:
        topic_ids: By name.
        ends: (topic, partition) to (first, next) offset.
    """
    today = topic_ids.get(position.topic)
    low, high = ends.get((position.topic, position.partition), (None, None))
    verdict: Verdict
    if position.error is not None:
        verdict = "unreadable"
    elif today is None and not position.topic.endswith("*"):
        verdict = "topic is gone"
    elif today is None or position.topic_id not in (None, today):
        verdict = "topic recreated"
    elif high is None or position.offset > high:
        verdict = "beyond the end"
    elif low is not None and position.offset < low:
        verdict = "before the start"
    else:
        verdict = "ok"
    return Diagnosis(position, today, low, high, verdict)


def examine(cluster: Cluster, positions: Sequence[StoredPosition]) -> list[Diagnosis]:
    """Diagnose every position, in the given order; groups the partitions of one place and topic."""
    topics = sorted({p.topic for p in positions if not p.topic.endswith("*")})
    topic_ids = cluster.topic_ids(topics)
    ends = {(t, p): pair for t in topic_ids for p, pair in cluster.watermarks(t).items()}
    order = {(p.process, p.place): number for number, p in enumerate(reversed(positions))}
    listed = sorted(
        positions,
        key=lambda p: (-order[p.process, p.place], p.topic, p.topic_id or "", p.partition),
    )
    return [diagnose(p, topic_ids, ends) for p in listed]


def format_diagnoses(diagnoses: Sequence[Diagnosis]) -> str:
    """Format a table of all positions, with a word on verdicts that need no action.

    Partitions that agree share a line.
    """
    if not diagnoses:
        return "no process has stored a position yet"
    head = (
        *("PROCESS", "KEPT IN", "TOPIC", "TOPIC ID", "TODAY"),
        *("PARTITION", "POSITION", "LOG", "VERDICT"),
    )
    table = text_table(head, map(_line, _groups(diagnoses)))
    if all(d.verdict == "ok" for d in diagnoses):
        return f"{table}\n\nevery position fits its topic"
    harmless = [d for d in diagnoses if d.verdict != "ok" and d.verdict not in SERIOUS]
    return "\n".join([table, "", *dict.fromkeys(f"{d.verdict}: {d.to_do}" for d in harmless)])


def _groups(diagnoses: Iterable[Diagnosis]) -> Iterable[list[Diagnosis]]:
    """Group neighbours of one process, topic, id and verdict; a serious one stays alone."""

    def key(numbered: tuple[int, Diagnosis]) -> object:
        number, d = numbered
        alone = d.verdict in SERIOUS
        p = d.position
        return (p.process, p.place, p.topic, p.topic_id, d.verdict, number if alone else None)

    return ([d for _, d in group] for _, group in groupby(enumerate(diagnoses), key))


def _line(group: Sequence[Diagnosis]) -> tuple[str, ...]:
    first, count = group[0], len(group)
    p = first.position
    log = "-" if first.high is None else f"{first.low}..{first.high}"
    return (
        p.process,
        p.place,
        p.topic,
        p.topic_id or "-",
        "same" if p.topic_id == first.topic_id else first.topic_id or "-",
        str(p.partition) if count == 1 else f"{count} partitions",
        str(p.offset) if count == 1 else str(sum(d.position.offset for d in group)),
        log if count == 1 else f"..{sum(d.high or 0 for d in group)}",
        first.verdict,
    )
