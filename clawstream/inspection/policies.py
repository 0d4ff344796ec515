"""Read and set the policies of runs for the inspector, as `clawstream policy` does."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from clawstream.inspector.queries.lake import Lake
from clawstream.inspector.queries.policy import PolicyLog, PolicyVersion
from clawstream.runtime.kafka import Cluster
from clawstream.runtime.process.config import with_values
from clawstream.schemas.codec.single_object import record_from
from clawstream.schemas.ids import RUN_ID
from clawstream.schemas.records import AdmissionPolicy
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.admit import policy_log
from clawstream.stream_jobs.admit.policy import SETTINGS, policy_rejection, settings_of
from clawstream.stream_jobs.admit.policy_log import (
    PolicyEntry,
    changed_policy,
    entries_of,
    newest_of,
)
from clawstream.stream_jobs.errors import PolicyRefused
from clawstream.trainer.settings_check import check_algorithm

_CHECKS = (check_algorithm,)


class RunPolicies:
    """The policies of all runs: implements `clawstream.inspector.queries.policy.Policies`.

    Args:
        settings: They name functions and topics.
        cluster: Where policies are published.
        lake: Read while no broker answers.
        connected: Whether a broker answers.
    """

    def __init__(
        self, settings: Settings, cluster: Cluster, lake: Lake, connected: Callable[[], bool]
    ) -> None:
        self._settings, self._cluster = settings, cluster
        self._lake, self._connected = lake, connected

    def of(self, run_id: str) -> PolicyLog | None:
        """Return the policies of a run; None if it has none."""
        if not RUN_ID.fullmatch(run_id):
            return None
        behind: Mapping[Any, int | None] = {}
        if self._connected():
            log = self._log(run_id)
            entries, has_ended = log.entries, log.ended is not None
            behind = {} if log.newest is None else log.behind(log.newest)
        else:
            entries, has_ended = self._of_lake(run_id)
        newest = newest_of(entries)
        if newest is None:
            return None
        return PolicyLog([_version(e) for e in entries], _version(newest), behind, has_ended)

    def changed(self, run_id: str, changes: Mapping[str, str]) -> PolicyVersion:
        """Return the newest policy with changes.

        Raises:
            PolicyRefused, SettingsError: A change is invalid.
        """
        entries = self._log(run_id).entries if self._connected() else self._of_lake(run_id)[0]
        newest = newest_of(entries)
        if newest is None:
            raise PolicyRefused(f"run {run_id} has no policy yet")
        made = changed_policy(self._of_run(run_id), newest.policy, changes, SETTINGS, _CHECKS)
        rejection = policy_rejection(made, newest.policy)
        if rejection is not None:
            raise PolicyRefused(rejection)
        return _version(PolicyEntry(0, made.created_at // 1000, made, None))

    def publish(self, run_id: str, changes: Mapping[str, str], by: str, on_version: int) -> int:
        """Publish the newest policy with changes and return its version.

        Raises:
            PolicyRefused: A change is invalid, or there is a newer policy than `on_version`.
            SettingsError: The new policy is invalid; the message names the setting.
        """
        if not changes:
            raise PolicyRefused("no field is changed")
        log = self._log(run_id)
        if log.newest is not None and log.newest.policy.policy_version != on_version:
            policy = log.newest.policy
            raise PolicyRefused(
                f"{policy.published_by} has set policy {policy.policy_version} since: look at it, "
                "and set yours again"
            )
        return log.set(changes, by, _CHECKS).policy.policy_version

    def _of_run(self, run_id: str) -> Settings:
        return with_values(self._settings, {"run_id": run_id})

    def _log(self, run_id: str) -> policy_log.PolicyLog:
        return policy_log.PolicyLog(self._of_run(run_id), self._cluster)

    def _of_lake(self, run_id: str) -> tuple[list[PolicyEntry], bool]:
        """Return the policies that the lake has, and whether the run has ended."""
        rows = self._lake.rows(
            """SELECT kind, policy_json, kafka_offset, epoch_ms(kafka_timestamp) AS at
            FROM run_events_raw WHERE run_id = $run AND kind IN ('policy', 'ended')
            ORDER BY kafka_timestamp, kafka_offset""",
            {"run": run_id},
        )
        published = (
            (r["kafka_offset"], r["at"], _decoded(r["policy_json"]))
            for r in rows
            if r["kind"] == "policy"
        )
        return entries_of(published), any(r["kind"] == "ended" for r in rows)


def _decoded(text: str) -> AdmissionPolicy:
    policy = record_from(AdmissionPolicy.__name__, json.loads(text))
    assert isinstance(policy, AdmissionPolicy)
    return policy


def _version(entry: PolicyEntry) -> PolicyVersion:
    policy = entry.policy
    at = datetime.fromtimestamp(entry.timestamp_ms / 1000, UTC).replace(tzinfo=None)
    return PolicyVersion(
        policy.policy_version, dict(settings_of(policy)), policy.published_by or SETTINGS, at,
        entry.rejection, json.dumps(dataclasses.asdict(policy)),
    )  # fmt: skip
