"""The policies of a run on `claw.candidates`: read, and set by a person while the run goes on. Also the run's end.

Nothing here talks to admission: it reads the same log, and a policy holds from its own offset on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from runtime.config import changed, value_of
from runtime.kafka import Cluster, Record
from runtime.records import Decoder, now_micros, publish_schemas
from schemas.errors import Undecodable, UnknownSchema
from schemas.events import AdmissionPolicy, Channel, RunEnded
from schemas.settings import PolicySettings, Settings
from schemas.topics import partition_of
from stream_jobs.errors import PolicyRefused
from stream_jobs.policy import flaw_of_policy, policy_of, settings_of

CHANNELS: tuple[Channel, ...] = ("train", "val")


class Entry(NamedTuple):
    """A policy on the log. timestamp_ms: the log's. flaw: why admission does not obey it; None: it does."""

    offset: int
    timestamp_ms: int
    policy: AdmissionPolicy
    flaw: str | None


def said_of_run(
    cluster: Cluster, decoder: Decoder, at: tuple[str, int], run_id: str, first: int
) -> Iterator[tuple[Record, AdmissionPolicy | RunEnded]]:
    """The policies and ends of a run from offset `first` of its candidates to the end of the log now. at: topic and partition."""
    key, type_name = run_id.encode(), decoder.codec.type_name
    for record in cluster.read_all(*at, first=first or None):
        if record.key != key or record.value is None:
            continue
        try:
            name = type_name(record.value)
        except UnknownSchema:
            name = "AdmissionPolicy"  # perhaps, of a newer release
        except Undecodable:
            continue  # admission buries it
        if name in ("AdmissionPolicy", "RunEnded"):
            try:
                event = decoder.decode(record.value)
            except (Undecodable, UnknownSchema):
                continue
            if isinstance(event, AdmissionPolicy | RunEnded) and event.run_id == run_id:
                yield record, event


class PolicyLog:
    """Policies of one run. Reads all of its candidates' headers: about a second for 100,000 of them."""

    def __init__(self, settings: Settings, cluster: Cluster) -> None:
        self._settings, self._cluster, self._topics = settings, cluster, settings.kafka.topics
        self.topic = self._topics.candidates
        partitions = cluster.topics(self.topic).get(self.topic)
        if not partitions:
            raise PolicyRefused(
                f"there is no topic {self.topic} on {settings.bootstrap_servers}: is kafka.topic_prefix right?"
            )
        self.partition = partition_of(settings.run_id.encode(), partitions)
        self._decoder = Decoder(cluster, self._topics.schemas)
        self.entries: list[Entry] = []
        self.ended: int | None = None
        """Offset at which the run ended."""
        self._read_to = 0
        self.read()

    def read(self) -> None:
        """Read on to the end of the log."""
        before = self.newest
        at, run = (self.topic, self.partition), self._settings.run_id
        end = self._cluster.watermarks(self.topic, [self.partition])[self.partition][1]
        for record, event in said_of_run(self._cluster, self._decoder, at, run, self._read_to):
            self._read_to = record.offset + 1
            if isinstance(event, RunEnded):
                self.ended = record.offset if self.ended is None else self.ended
                continue
            flaw = flaw_of_policy(event, before.policy if before is not None else None)
            entry = Entry(record.offset, record.timestamp_ms, event, flaw)
            self.entries.append(entry)
            before = entry if flaw is None else before
        self._read_to = max(self._read_to, end)

    @property
    def newest(self) -> Entry | None:
        """The one that is obeyed once everything has been read."""
        return next((e for e in reversed(self.entries) if e.flaw is None), None)

    def behind(self, entry: Entry) -> Mapping[Channel, int | None]:
        """Of each channel, how many records admission has to read until the policy holds; None: no admission has read this run."""
        found: dict[Channel, int | None] = {}
        for channel in CHANNELS:
            group = f"{self._settings.kafka.topic_prefix}-admit.{self._settings.run_id}.{channel}"
            position = self._cluster.committed(group).get((self.topic, self.partition))
            found[channel] = None if position is None else max(0, entry.offset + 1 - position)
        return found

    def set(self, changes: Mapping[str, str], by: str) -> Entry:
        """Publish the newest policy with some fields changed. changes: name as in `admit.policy` to YAML text.

        Raises PolicyRefused, or SettingsError that names the setting.
        """
        newest, run = self.newest, self._settings.run_id
        self._still_open()
        if newest is None:
            raise PolicyRefused(
                f"run {run} has no policy yet: say it in the settings, admit.policy.*, and start clawstream admit"
            )
        unknown = changes.keys() - PolicySettings.model_fields.keys()
        if unknown:
            raise PolicyRefused(
                f"no {', '.join(sorted(unknown))} in a policy; there are {', '.join(PolicySettings.model_fields)}"
            )
        made = changed_policy(self._settings, newest.policy, changes, by)
        flaw = flaw_of_policy(made, newest.policy)
        if flaw is not None:
            raise PolicyRefused(flaw)
        self._put(made)
        self.read()
        mine = next(e for e in reversed(self.entries) if e.policy == made)
        if mine.flaw is not None:
            raise PolicyRefused(
                f"someone else set a policy at the same time: {mine.flaw}. Look at it, and set yours again"
            )
        return mine

    def end(self, reason: str | None) -> int:
        """End the run for ever; returns the offset from which it is over. Raises PolicyRefused when there is no such run, or it has ended."""
        run = self._settings.run_id
        self._still_open()
        if self.newest is None:
            raise PolicyRefused(f"there is no run {run}: it has no policy")
        self._put(RunEnded(run_id=run, reason=reason, created_at=now_micros()))
        self.read()
        if self.ended is None:
            raise PolicyRefused(f"the end of run {run} is not on {self.topic}: was the topic made anew?")
        return self.ended

    def _still_open(self) -> None:
        if self.ended is not None:
            raise PolicyRefused(f"run {self._settings.run_id} has ended, at offset {self.ended} of {self.topic}")

    def _put(self, event: AdmissionPolicy | RunEnded) -> None:
        publish_schemas(self._cluster, self._topics.schemas)
        producer = self._cluster.producer()
        producer.put(self.topic, event.run_id.encode(), self._decoder.codec.encode(event))
        producer.flush()
        producer.close()


def changed_policy(settings: Settings, policy: AdmissionPolicy, changes: Mapping[str, str], by: str) -> AdmissionPolicy:
    """The next version of a policy, judged as settings are. Raises SettingsError that names the setting."""
    values: dict[str, Any] = {"admit.policy": dict(settings_of(policy)), "trainer.sync_every": policy.sync_every}
    for name, text in changes.items():
        path = f"admit.policy.{name}"
        values[path] = value_of(text, path)
        if name == "sync_every":  # else it would be refused for the trainer's sake
            values["trainer.sync_every"] = values[path]
    return policy_of(changed(settings, values), policy.policy_version + 1, now_micros(), by)
