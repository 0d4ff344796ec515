"""`clawstream train --from-lake`: make batches of recorded trajectories for a trainer.

1. Pin the data: the Delta version of each table.
2. Replay the selected trajectories from the lake (`clawstream.ops.replay.run`), as a run of its
   own. Its name follows from everything that its batches depend on. So the same command finds the
   finished replay, and the trainer continues from its checkpoint.
3. Return settings with which a trainer reads those batches and ends after the last one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from clawstream.ops.replay.run import (
    ReplayRequest,
    identity,
    keep_settings,
    replay_settings,
    run_replay,
)
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.lake.delta.snapshots import find_snapshot, take_snapshot
from clawstream.stream_jobs.lake.tables.catalog import catalog


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineTraining:
    """A finished replay, and how to train on it.

    Attributes:
        settings: of the trainer.
        as_of: time of the state of the lake; `version=` it reads the same again.
        versions: table to Delta version; one without is empty.
        report: of the replay.
        left_out: batches after the last multiple of sync_every, which make no version.
    """

    settings: Settings
    as_of: str
    versions: Mapping[str, int | None]
    report: Mapping[str, Any]
    left_out: int


def prepare(
    settings: Settings,
    where: str = "",
    version: str | None = None,
    name: str | None = None,
    max_staleness: int | None = None,
) -> OfflineTraining:
    """Replay recorded trajectories and return how to train on them.

    The staleness of the recorded run says nothing of another one: no limit of the settings or of
    the recorded policy applies.

    Args:
        settings: of the recorded run; `trainer.*` is for the training.
        where: SQL condition over the view `trajectories` of the run; empty: all of them.
        version: a named snapshot or a time; None: now.
        name: of the replay and of the run that is trained; default: made from the request.
        max_staleness: limit of the offline training; None: there is none.

    Raises:
        SettingsError: the selected trajectories give no version.
        SqlError, LakeError, PrefixTaken, or a KafkaError.
    """
    state = take_snapshot(settings) if version is None else find_snapshot(settings, version)
    versions = {name: state["versions"].get(name) for name in catalog()}
    policy = settings.admit.policy.model_copy(update={"max_staleness": max_staleness})
    settings = settings.model_copy(
        update={"admit": settings.admit.model_copy(update={"policy": policy})}
    )
    name = name or name_of(settings, versions, where)
    request = ReplayRequest(name, versions, as_run=name, where=where)
    report = run_replay(settings, request)
    every = settings.admit.policy.sync_every
    batches = len(report["channels"].get("train", {"batches": ()})["batches"])
    if batches < every:
        refused = report["channels"].get("train", {}).get("refused", {})
        raise SettingsError(
            f"replay {name} of {report['steps']} steps has {batches} batches, and "
            f"admit.policy.sync_every={every} make a version; refused: {json.dumps(refused)}. "
            "Groups are trained whole: select whole groups, or set admit.policy.group_size and "
            "admit.policy.batch_groups"
        )
    trained = settings_for_training(settings, report, batches // every)
    keep_settings(trained)
    return OfflineTraining(
        settings=trained,
        as_of=state["at"],
        versions=versions,
        report=report,
        left_out=batches % every,
    )


def name_of(settings: Settings, versions: Mapping[str, int | None], where: str) -> str:
    """Return a name that differs for any two requests whose batches can differ."""
    asked = identity(settings, ReplayRequest("", versions, where=where))
    digest = sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    return f"offline-{digest[:12]}"


def settings_for_training(settings: Settings, report: Mapping[str, Any], versions: int) -> Settings:
    """Return the settings of the replay for a trainer that ends after `versions` versions.

    A lower trainer.max_versions stays. The first attempt is higher than any in the recorded tokens.
    """
    target = replay_settings(settings, report["name"], report["run"], report["partitions"])
    limit, newest = settings.trainer.max_versions, report["newest_attempt"]
    first = settings.trainer.first_attempt
    changes = {
        "max_versions": versions if limit is None else min(limit, versions),
        "first_attempt": first if newest is None else max(first, newest + 1),
    }
    trainer = target.trainer.model_copy(update=changes)
    return target.model_copy(update={"trainer": trainer})
