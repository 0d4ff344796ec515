"""A topic prefix that one replay creates and fills once.

A file holds request, plan and result. A killed command starts over with the same plan on recreated
topics; a finished one returns its result. Topics without such a file are never touched.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clawstream.runtime.atomic_file import write_durably
from clawstream.runtime.errors import PlumbingError
from clawstream.runtime.file_lock import exclusive
from clawstream.runtime.kafka import Cluster, Unavailable
from clawstream.runtime.logs import logger
from clawstream.runtime.topics.records import create_topics
from clawstream.schemas.settings import Settings
from clawstream.schemas.topics import TopicSpec

Plain = dict[str, Any]
"""Values that JSON can represent."""
GONE_S = 30.0


class PrefixTaken(PlumbingError):
    """The topics of this prefix belong to others, or were created for a different request."""


@dataclass(frozen=True, slots=True)
class PrefixState:
    """plan: What to do. result: The result of an earlier call, or None."""

    plan: Plain
    result: Plain | None


class TargetPrefix:
    """A topic prefix, and the file with its request, plan and result."""

    def __init__(self, cluster: Cluster, prefix: str, file: Path) -> None:
        self._cluster, self.file = cluster, file
        self._prefix = f"{prefix}."

    def held(self) -> AbstractContextManager[None]:
        """Lock the prefix against other commands. Raises PrefixTaken."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        taken = PrefixTaken(f"another command is just filling the topics of {self._prefix}*")
        return exclusive(self.file.with_suffix(".lock"), taken, patience_s=0)

    def begin(self, asked: Plain, plan: Callable[[], Plain]) -> PrefixState:
        """Return the stored plan, or make it; an unfinished one starts over without its topics.

        Raises:
            PrefixTaken: The topics belong to others or to a different request.
        """
        asked = json.loads(json.dumps(asked))
        known = self.read()
        mine = self._there()
        if known is None:
            if mine:
                raise PrefixTaken(
                    f"there are topics already: {', '.join(mine[:3])}, ...; choose another name"
                )
            known = {"asked": asked, "plan": plan(), "result": None}
            self._write(known)
        elif known["asked"] != asked:
            differs = [k for k in asked | known["asked"] if asked.get(k) != known["asked"].get(k)]
            hint = (
                "; the lake has changed since: give version= of the first time for the same data"
                if "table_versions" in differs
                else ""
            )
            raise PrefixTaken(
                f"{self.file} is of another request ({', '.join(differs)}){hint}; choose another "
                "name or delete it"
            )
        if known["result"] is None and mine:
            logger().warning("begins_again", topics=len(mine), file=str(self.file))
            self._delete(mine)
        return PrefixState(json.loads(json.dumps(known["plan"])), known["result"])

    def make(self, settings: Settings, timed: Iterable[str]) -> None:
        """Create the empty topics.

        timed: Topics that keep given timestamps and have no retention.
        """
        kafka, kept = settings.kafka, frozenset(timed)
        for spec in kafka.topics.specs(kafka.partitions, int(kafka.steps_retention_s * 1000)):
            if spec.name in kept:
                made = keeping_time(spec)
                self._cluster.create_topic(
                    made.name, made.partitions, made.config, *settings.replication
                )
        create_topics(self._cluster, settings)

    def done(self, result: Plain) -> None:
        """Store the result: from now on `begin` only returns it."""
        known = self.read()
        assert known is not None, "done before begin"
        self._write(known | {"result": result})

    def read(self) -> Plain | None:
        """Return the file's request ("asked"), plan and result, or None without a file."""
        return json.loads(self.file.read_text()) if self.file.exists() else None

    def delete(self) -> int:
        """Delete the topics and the file; return the number of topics."""
        mine = self._there()
        self._delete(mine)
        self.file.unlink(missing_ok=True)
        return len(mine)

    def _write(self, known: Plain) -> None:
        write_durably(self.file, (json.dumps(known, indent=1) + "\n").encode())

    def _there(self) -> list[str]:
        return sorted(t for t in self._cluster.topics() if t.startswith(self._prefix))

    def _delete(self, topics: Iterable[str]) -> None:
        for topic in topics:
            self._cluster.delete_topic(topic)
        deadline = time.monotonic() + GONE_S
        while left := self._there():
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"topics were deleted but are still there after {GONE_S:g} s: {', '.join(left)}"
                )
            time.sleep(0.05)


def keeping_time(spec: TopicSpec) -> TopicSpec:
    """Return the topic with CreateTime and no retention by time, which would delete old records."""
    return replace(
        spec, config={**spec.config, "message.timestamp.type": "CreateTime", "retention.ms": "-1"}
    )
