"""Publish weight versions: model files or a delta, their checksums, and the manifest."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from clawstream.runtime.topics.records import now_micros
from clawstream.runtime.weights.delta import Snapshot, mapped, write_delta
from clawstream.runtime.weights.files import SUFFIX, local_path
from clawstream.schemas.ids import Version, parse_version
from clawstream.schemas.records import WeightFile, WeightVersion
from clawstream.schemas.settings import Settings
from clawstream.trainer.errors import InvalidCheckpoint
from clawstream.trainer.model.policy import Policy
from clawstream.trainer.versions.directory import (
    DirectoryInfo,
    VersionState,
    directory_of,
    file_system,
    new_directory,
    read_info,
    upload,
)

DELTA = f"model{SUFFIX}"
"""Name of the file of a delta version, which is against the parent of the version."""
STAGING = "weights-staging"


class Exported(NamedTuple):
    """The files that a version needs, its bases first; whether it is a delta."""

    files: tuple[WeightFile, ...]
    is_delta: bool


class Publisher:
    """Write the files of a run's versions to `trainer.weights_uri`.

    With `trainer.full_every` above 1 each model is saved to `<data_dir>/weights-staging` first. The
    one of the last version stays there as memory maps, to compare the next one with. Nothing in the
    directory of a version is mapped or deleted before it is published: a network file system keeps
    deleted files that are in use, under other names in the same directory. After a start there is
    no last model, so the first version is full.
    """

    def __init__(self, settings: Settings, policy: Policy) -> None:
        self._settings, self._policy = settings, policy
        self._staging = settings.data_dir.absolute() / STAGING
        local = local_path(settings.weights_uri)
        self._remote = local is None
        self._root = self._staging if local is None else local
        self._last: Snapshot | None = None
        self._files: tuple[WeightFile, ...] = ()
        if policy.processes.leads:
            shutil.rmtree(self._staging / settings.run_id, ignore_errors=True)

    def export(self, state: VersionState) -> Exported:
        """Write the policy's model, its weights rounded to the served dtypes, or a delta of it.

        Every process must call this; the files are the leader's.

        Args:
            state: of the version. Its parent is the version of the call before.

        Returns:
            All files that the version needs: of a delta, also those of the last full version and of
            the deltas since then.

        Raises:
            FileExistsError: the version has a directory.
            StorageFailed: the upload failed.
        """
        settings, version = self._settings, state.version
        dtypes = self._policy.served_dtypes(settings.rollout.dtype)
        if not self._policy.processes.leads:
            self._policy.save(self._root, dtypes)
            return Exported((), is_delta=False)
        delta = model = None
        with new_directory(self._root, state) as directory:
            if settings.trainer.full_every > 1 and self._policy.base_model is None:
                model = self._staging / version.run_id / f"model-{version.sync_index}"
                model.mkdir(parents=True)
                self._policy.save(model, dtypes)
                delta = self._write(model, directory)
            else:
                self._policy.save(directory, dtypes)
        info, own = _files_in(directory_of(self._root, version), settings.weights_uri, version)
        if model is not None:
            self._keep(model, delta, info.files)
        self._files = own if delta is None else (*self._files, *own)
        if self._remote:
            source = directory_of(self._root, version)
            upload(source, settings.weights_uri, info)
            shutil.rmtree(source)
        return Exported(self._files, delta is not None)

    def _write(self, model: Path, directory: Path) -> Snapshot | None:
        """Write a model, or its delta to the last one, to a directory.

        Returns:
            The model, if it was written as a delta.
        """
        delta = None
        deltas = sum(file.url.endswith(f"/{DELTA}") for file in self._files)
        if self._last is not None and deltas + 1 < self._settings.trainer.full_every:
            with (directory / DELTA).open("wb") as target:
                delta = write_delta(self._last, mapped(model), target)
            if delta is None:
                (directory / DELTA).unlink()
        if delta is None:
            shutil.copytree(model, directory, dirs_exist_ok=True)
        return delta

    def _keep(self, model: Path, delta: Snapshot | None, digests: Mapping[str, str]) -> None:
        """Let a model be the last one, and delete the one before.

        Args:
            model: its directory.
            delta: the model, if it was written as a delta.
            digests: SHA-256 of the files of its version, by name.
        """
        if delta is None:
            content = mapped(model)
            delta = Snapshot(content, {name: digests[name] for name in content})
        self._last = delta
        for other in model.parent.glob("model-*"):  # no longer mapped
            if other != model:
                shutil.rmtree(other, ignore_errors=True)


def files_of(uri: str, version: Version) -> tuple[WeightFile, ...]:
    """Return the files that a published version needs, its bases first.

    Args:
        uri: of all versions.
        version: it has a directory.

    Raises:
        InvalidCheckpoint: the directory of the version, or of a base, is absent or unreadable.
    """
    found: tuple[WeightFile, ...] = ()
    at: Version | None = version
    while at is not None:
        info, own = _files_in(f"{uri}/{at}", uri, at)
        found = (*own, *found)
        if DELTA not in info.files:
            return found
        at = parse_version(info.state.parent_version or "")
    raise InvalidCheckpoint(f"{uri}/{version}: a delta without a parent")


def _files_in(
    directory: str | Path, uri: str, version: Version
) -> tuple[DirectoryInfo, tuple[WeightFile, ...]]:
    """Return the content of a version's directory, and its files as a manifest names them.

    Args:
        directory: to read.
        uri: of all versions.
        version: of the directory.
    """
    info, root = read_info(directory), local_path(uri)
    files, path = file_system(directory)
    return info, tuple(
        WeightFile(
            url=f"{uri}/{version}/{name}"
            if root is None
            else (root / str(version) / name).as_uri(),
            sha256=digest,
            size_bytes=files.size(f"{path}/{name}"),
        )
        for name, digest in sorted(info.files.items())
    )


def manifest(
    state: VersionState,
    first_batch_seq: int,
    exported: Exported,
    checkpoint: VersionState | None,
    metrics: Mapping[str, float],
    base_model: str | None,
) -> WeightVersion:
    """Return the record of a version.

    Its batches are those from first_batch_seq to its own position; there may be none.

    Args:
        state: of the version.
        first_batch_seq: first batch since the parent.
        exported: from `export`.
        checkpoint: the newest complete checkpoint.
        metrics: of the version.
        base_model: digest of the model that an adapter belongs to; None: no adapter.
    """
    last = state.position.next_batch_seq - 1
    trained, is_delta = first_batch_seq <= last, exported.is_delta
    return WeightVersion(
        version_id=str(state.version),
        **state.version._asdict(),
        parent_version=state.parent_version,
        format="full" if base_model is None and not is_delta else "delta",
        base_version=state.parent_version if is_delta else None,
        base_model=base_model,
        files=exported.files,
        checkpoint_version=str(checkpoint.version) if checkpoint else None,
        channel="train",
        batches_topic_id=state.position.topic_id,
        first_batch_seq=first_batch_seq if trained else None,
        last_batch_seq=last if trained else None,
        metrics=metrics,
        created_at=now_micros(),
    )
