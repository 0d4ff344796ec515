"""Publish weight versions: model files or a delta, their checksums, and the manifest."""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Mapping
from pathlib import Path

from runtime.topics.records import now_micros
from runtime.weights.delta import Snapshot, mapped, write_delta
from runtime.weights.files import SUFFIX, local_path
from schemas.ids import Version, parse_version
from schemas.records import WeightFile, WeightVersion
from schemas.settings import Settings
from trainer.errors import InvalidCheckpoint, WeightsNotWritten
from trainer.model.policy import Policy
from trainer.versions.directory import (
    INFO,
    VersionState,
    directory_of,
    file_system,
    new_directory,
    read_info,
)

DELTA = f"model{SUFFIX}"
"""Name of the file of a delta version, which is against the parent of the version."""
STAGING = "weights-staging"


class Publisher:
    """Write the files of a run's versions to `trainer.weights_uri`.

    With `trainer.full_every` above 1 the tensors of the last version are kept to compare the next
    one with: as memory maps of its files, which take disk space even after the files are deleted.
    After a start there are none, so the first version is full.
    """

    def __init__(self, settings: Settings, policy: Policy) -> None:
        self._settings, self._policy = settings, policy
        local = local_path(settings.weights_uri)
        self._remote = local is None
        self._root = settings.data_dir.absolute() / STAGING if local is None else local
        self._last: Snapshot | None = None
        self._deltas = 0
        if self._remote and policy.processes.leads:
            shutil.rmtree(self._root, ignore_errors=True)

    def export(self, state: VersionState) -> tuple[WeightFile, ...]:
        """Write the policy's model, its weights rounded to the served dtypes, or a delta of it.

        Every process must call this; the files are the leader's.

        Args:
            state: of the version. Its parent is the version of the call before.

        Returns:
            All files that the version needs: of a delta, also those of the last full version and of
            the deltas since then.

        Raises:
            FileExistsError: the version has a directory.
            WeightsNotWritten: the upload failed.
        """
        dtypes = self._policy.served_dtypes(self._settings.rollout.dtype)
        if not self._policy.processes.leads:
            self._policy.save(self._root, dtypes)
            return ()
        makes_deltas = self._settings.trainer.full_every > 1 and self._policy.base_model is None
        with new_directory(self._root, state) as directory:
            self._policy.save(directory, dtypes)
            content = mapped(directory) if makes_deltas else {}
            snapshot = self._replace_by_delta(directory, content)
        if snapshot is None:
            digests = read_info(directory_of(self._root, state.version)).files
            snapshot = Snapshot(content, {name: digests[name] for name in content})
            self._deltas = 0
        else:
            self._deltas += 1
        self._last = snapshot if makes_deltas else None
        if self._remote:
            self._upload(state.version)
        return files_of(self._settings.weights_uri, state.version)

    def _replace_by_delta(
        self, directory: Path, content: Mapping[str, mmap.mmap]
    ) -> Snapshot | None:
        """Replace the files of a model by a delta; return None if the version stays full."""
        if self._last is None or self._deltas + 1 >= self._settings.trainer.full_every:
            return None
        with (directory / DELTA).open("wb") as target:
            snapshot = write_delta(self._last, content, target)
        for path in directory.iterdir():
            if (path.name == DELTA) == (snapshot is None):
                path.unlink()
        return snapshot

    def _upload(self, version: Version) -> None:
        """Move the directory of a version from the staging directory to the remote one."""
        source, target = (
            directory_of(self._root, version),
            f"{self._settings.weights_uri}/{version}",
        )
        names = (INFO, *sorted(read_info(source).files))
        try:
            files, path = file_system(target)
            files.makedirs(path, exist_ok=True)
            for name in names:
                files.put_file(str(source / name), f"{path}/{name}")
        except MemoryError:
            raise
        except Exception as e:  # every file system of fsspec has errors of its own
            raise WeightsNotWritten(f"{target}: {type(e).__name__}: {e}") from e
        shutil.rmtree(source)


def files_of(uri: str, version: Version) -> tuple[WeightFile, ...]:
    """Return the files that a published version needs, its bases first.

    Args:
        uri: of all versions.
        version: it has a directory.

    Raises:
        InvalidCheckpoint: the directory of the version, or of a base, is absent or unreadable.
    """
    info, root = read_info(f"{uri}/{version}"), local_path(uri)
    files, path = file_system(f"{uri}/{version}")
    own = tuple(
        WeightFile(
            url=f"{uri}/{version}/{name}"
            if root is None
            else (root / str(version) / name).as_uri(),
            sha256=digest,
            size_bytes=files.size(f"{path}/{name}"),
        )
        for name, digest in sorted(info.files.items())
    )
    if DELTA not in info.files:
        return own
    parent = parse_version(info.state.parent_version or "")
    if parent is None:
        raise InvalidCheckpoint(f"{uri}/{version}: a delta without a parent")
    return (*files_of(uri, parent), *own)


def manifest(
    state: VersionState,
    first_batch_seq: int,
    files: tuple[WeightFile, ...],
    checkpoint: VersionState | None,
    metrics: Mapping[str, float],
    base_model: str | None,
) -> WeightVersion:
    """Return the record of a version.

    Its batches are those from first_batch_seq to its own position; there may be none.

    Args:
        state: of the version.
        first_batch_seq: first batch since the parent.
        files: from `export`.
        checkpoint: the newest complete checkpoint.
        metrics: of the version.
        base_model: digest of the model that an adapter belongs to; None: no adapter.
    """
    last = state.position.next_batch_seq - 1
    trained, delta = first_batch_seq <= last, bool(files) and files[-1].url.endswith(f"/{DELTA}")
    return WeightVersion(
        version_id=str(state.version),
        **state.version._asdict(),
        parent_version=state.parent_version,
        format="full" if base_model is None and not delta else "delta",
        base_version=state.parent_version if delta else None,
        base_model=base_model,
        files=files,
        checkpoint_version=str(checkpoint.version) if checkpoint else None,
        channel="train",
        batches_topic_id=state.position.topic_id,
        first_batch_seq=first_batch_seq if trained else None,
        last_batch_seq=last if trained else None,
        metrics=metrics,
        created_at=now_micros(),
    )
