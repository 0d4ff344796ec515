"""Read the policies of a run from `claw.candidates`, set a policy during a run, and end a run.

Nothing here calls admission: both read the same log, and a policy holds from its own offset on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from clawstream.runtime.kafka import Cluster
from clawstream.runtime.process.config import value_of, with_values
from clawstream.runtime.topics.records import Decoder, now_micros, publish_schemas
from clawstream.schemas.records import AdmissionPolicy, Channel, RunEnded
from clawstream.schemas.settings import PolicySettings, Settings
from clawstream.schemas.topics import partition_of
from clawstream.stream_jobs.admit.policy import policy_of, policy_rejection, settings_of
from clawstream.stream_jobs.admit.run_index import RunFinder
from clawstream.stream_jobs.errors import PolicyRefused

CHANNELS: tuple[Channel, ...] = ("train", "val")


class PolicyEntry(NamedTuple):
    """A policy on the log. rejection: why admission ignores it; None when it is valid."""

    offset: int
    timestamp_ms: int
    policy: AdmissionPolicy
    rejection: str | None


class PolicyLog:
    """The policies of one run."""

    def __init__(self, settings: Settings, cluster: Cluster) -> None:
        self._settings, self._cluster, self._topics = settings, cluster, settings.kafka.topics
        self.topic = self._topics.candidates
        partitions = cluster.topics(self.topic).get(self.topic)
        if not partitions:
            raise PolicyRefused(
                f"there is no topic {self.topic} on {settings.bootstrap_servers}: is "
                "kafka.topic_prefix right?"
            )
        self.partition = partition_of(settings.run_id.encode(), partitions)
        self._decoder = Decoder(cluster, self._topics.schemas)
        self._finder = RunFinder(cluster, self._decoder, self._topics, self.partition)
        self.entries: list[PolicyEntry] = []
        self.ended: int | None = None
        """Offset at which the run ended."""
        self.read()

    def read(self) -> None:
        """Read on to the end of the log."""
        self._finder.read()
        published = []
        for offset, timestamp_ms, event in self._finder.events(self._settings.run_id):
            if isinstance(event, RunEnded):
                self.ended = offset
            else:
                published.append((offset, timestamp_ms, event))
        self.entries = entries_of(published)

    @property
    def newest(self) -> PolicyEntry | None:
        """The valid policy in force at the end of the log."""
        return newest_of(self.entries)

    def behind(self, entry: PolicyEntry) -> Mapping[Channel, int | None]:
        """Return for each channel how many records admission must read before the policy holds."""
        found: dict[Channel, int | None] = {}
        for channel in CHANNELS:
            group = f"{self._settings.kafka.topic_prefix}-admit.{self._settings.run_id}.{channel}"
            position = self._cluster.committed(group).get((self.topic, self.partition))
            found[channel] = None if position is None else max(0, entry.offset + 1 - position)
        return found

    def set(
        self, changes: Mapping[str, str], by: str, checks: Iterable[Callable[[Settings], None]] = ()
    ) -> PolicyEntry:
        """Publish the newest policy with some fields changed. Arguments as in `changed_policy`.

        Raises:
            PolicyRefused: The change is invalid, or the run has ended or has no policy.
            SettingsError: The new policy is invalid; the message names the setting.
        """
        newest, run = self.newest, self._settings.run_id
        self._still_open()
        if newest is None:
            raise PolicyRefused(
                f"run {run} has no policy yet: put it into the settings, admit.policy.*, and start "
                "clawstream admit"
            )
        unknown = changes.keys() - PolicySettings.model_fields.keys()
        if unknown:
            raise PolicyRefused(
                f"no {', '.join(sorted(unknown))} in a policy; there are "
                f"{', '.join(PolicySettings.model_fields)}"
            )
        made = changed_policy(self._settings, newest.policy, changes, by, checks)
        rejection = policy_rejection(made, newest.policy)
        if rejection is not None:
            raise PolicyRefused(rejection)
        self._put(made)
        self.read()
        mine = next(e for e in reversed(self.entries) if e.policy == made)
        if mine.rejection is not None:
            raise PolicyRefused(
                f"another user set a policy at the same time: {mine.rejection}. Look at it, and "
                "set yours again"
            )
        return mine

    def end(self, reason: str | None) -> int:
        """End the run for ever and return the offset of its end.

        Raises:
            PolicyRefused: The run does not exist or has ended.
        """
        run = self._settings.run_id
        self._still_open()
        if self.newest is None:
            raise PolicyRefused(f"there is no run {run}: it has no policy")
        self._put(RunEnded(run_id=run, reason=reason, created_at=now_micros()))
        self.read()
        if self.ended is None:
            raise PolicyRefused(
                f"the end of run {run} is not on {self.topic}: was the topic recreated?"
            )
        return self.ended

    def _still_open(self) -> None:
        if self.ended is not None:
            raise PolicyRefused(
                f"run {self._settings.run_id} has ended, at offset {self.ended} of {self.topic}"
            )

    def _put(self, event: AdmissionPolicy | RunEnded) -> None:
        publish_schemas(self._cluster, self._topics.schemas)
        producer = self._cluster.producer()
        producer.put(self.topic, event.run_id.encode(), self._decoder.codec.encode(event))
        producer.flush()
        producer.close()


def entries_of(published: Iterable[tuple[int, int, AdmissionPolicy]]) -> list[PolicyEntry]:
    """Return policies in log order, with the rejection of each.

    Args:
        published: Offset, log time in ms, and policy.
    """
    entries, before = [], None
    for offset, timestamp_ms, policy in published:
        rejection = policy_rejection(policy, before)
        entries.append(PolicyEntry(offset, timestamp_ms, policy, rejection))
        before = policy if rejection is None else before
    return entries


def newest_of(entries: Sequence[PolicyEntry]) -> PolicyEntry | None:
    """Return the policy in force after entries in log order; None without a valid one."""
    return next((e for e in reversed(entries) if e.rejection is None), None)


def changed_policy(
    settings: Settings,
    policy: AdmissionPolicy,
    changes: Mapping[str, str],
    by: str,
    checks: Iterable[Callable[[Settings], None]] = (),
) -> AdmissionPolicy:
    """Return the next version of a policy, validated like settings.

    Args:
        settings: They name the functions. Unless set, what groups wait for follows from these.
        policy: The policy in force.
        changes: Name as in `admit.policy` to YAML text.
        by: The user who changes it.
        checks: Further checks of the settings that give the new policy. Each raises SettingsError.

    Raises:
        SettingsError: The new policy is invalid; the message names the setting.
    """
    fields = dict(settings_of(policy))
    fields |= dict.fromkeys(_following(settings, policy))
    values: dict[str, Any] = {"admit.policy": fields}
    for name, text in changes.items():
        path = f"admit.policy.{name}"
        values[path] = value_of(text, path)
    new = with_values(settings, values)
    for check in checks:
        check(new)
    return policy_of(new, policy.policy_version + 1, now_micros(), by)


def _following(settings: Settings, policy: AdmissionPolicy) -> Iterator[str]:
    """Yield the fields that follow from the functions of the settings, also in the next policy.

    A policy does not record whether a field was set. A field follows when its value is empty, or
    when the functions give this value under this policy and the settings do not set it.
    """
    derived = settings_of(policy).model_copy(
        update=dict.fromkeys(("required_rewards", "require_assessment"))
    )
    unset = settings.model_copy(
        update={"admit": settings.admit.model_copy(update={"policy": derived})}
    )
    for name in ("required_rewards", "require_assessment"):
        value = getattr(policy, name)
        is_set = getattr(settings.admit.policy, name) == value
        if not value or (value == getattr(unset, name) and not is_set):
            yield name
