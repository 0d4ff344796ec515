"""Directories of versions: checkpoints and published weights. Each is complete or absent.

The directory of a version is `<root>/<run>/<sync index>.<attempt>`. Published weights, and copies
of checkpoints, may be on any file system of fsspec; then a directory is made on this machine and
uploaded.

1. All files are written into `.tmp-<name>` beside the final place.
2. Each file is synced to disk, then the directories.
3. One rename makes the directory real, and the parent is synced.

A process killed before step 3 leaves only a `.tmp-` directory, which the next start deletes. Every
directory has a `clawstream.json`: the version, and the checksums of all other files. It is uploaded
first, and of an unpublished version deleted last, so what a kill leaves is known to be ours.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from pydantic import TypeAdapter, ValidationError

from clawstream.runtime.atomic_file import fsync_path, is_full
from clawstream.runtime.digests import sha256
from clawstream.runtime.logs import logger
from clawstream.schemas.errors import ForeseenError
from clawstream.schemas.ids import Version
from clawstream.trainer.errors import InvalidCheckpoint, StorageFailed
from clawstream.trainer.position import Position

INFO = "clawstream.json"
_NAME = re.compile(r"(\d{1,18})\.(\d{1,18})")
_TMP = ".tmp-"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionState:
    """A version and its place in the run.

    Attributes:
        parent_version: id of the version that was trained further; None for the first.
        weights_topic_id: the weights log on which the version counts once it is published.
        position: of the trainer after the version's batches.
    """

    version: Version
    parent_version: str | None
    weights_topic_id: str
    position: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryInfo:
    """The content of `clawstream.json`. files: path within the directory to sha256."""

    state: VersionState
    files: Mapping[str, str]


_INFO = TypeAdapter(DirectoryInfo)


def directory_of(root: Path, version: Version) -> Path:
    """Return the path of the version's directory."""
    return root / str(version)


def temporary_directory(root: Path, version: Version) -> Path:
    """Return the path of the version's directory while it is being written."""
    final = directory_of(root, version)
    return final.with_name(_TMP + final.name)


@contextmanager
def writing_to(root: Path) -> Iterator[None]:
    """Raise StorageFailed, with the settings, where this process may not write."""
    try:
        yield
    except OSError as e:
        if is_full(e):  # says itself what to do
            raise
        raise StorageFailed(
            f"{e}: the trainer must be able to write to {root} (settings trainer.weights_uri and "
            "trainer.checkpoint_dir)"
        ) from e


@contextmanager
def new_directory(root: Path, state: VersionState) -> Iterator[Path]:
    """Yield a directory to fill, which becomes the version's directory at the end of the block.

    Raises:
        FileExistsError: the version has a directory.
        StorageFailed: this process may not write there.
    """
    final = directory_of(root, state.version)
    if final.exists():
        raise FileExistsError(
            f"{final} is there already: another trainer of this run writes to the same place"
        )
    tmp = temporary_directory(root, state.version)
    with writing_to(root):
        tmp.mkdir(parents=True, exist_ok=True)  # another process of this trainer may have made it
    yield tmp
    info = DirectoryInfo(state=state, files=digests(tmp))
    (tmp / INFO).write_bytes(_INFO.dump_json(info, indent=1))
    _complete(tmp, final)


def _complete(tmp: Path, final: Path) -> None:
    """Make a filled directory durable, then real."""
    for path in (*tmp.rglob("*"), tmp):
        fsync_path(path)
    tmp.rename(final)
    fsync_path(final.parent)


def digests(directory: Path) -> dict[str, str]:
    """Return the sha256 of every file but clawstream.json by its path within the directory."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != INFO)
    return {str(path.relative_to(directory)): sha256(path) for path in files}


def read_info(directory: str | Path) -> DirectoryInfo:
    """Read clawstream.json.

    Raises:
        InvalidCheckpoint: it is absent or unreadable.
    """
    files, path = file_system(directory)
    try:
        return _INFO.validate_json(files.cat_file(f"{path}/{INFO}"))
    except (OSError, ValidationError) as e:
        raise InvalidCheckpoint(f"{directory}: {INFO} can't be read: {e}") from e


def verify(directory: Path, version: Version) -> VersionState:
    """Return the state of the directory of a version after checking every file.

    Raises:
        InvalidCheckpoint: it is of another version, or a file is missing, altered or not one that
            was written.
    """
    info, found = read_info(directory), digests(directory)
    if wrong := sorted(found.items() ^ info.files.items()):
        raise InvalidCheckpoint(f"{directory}: {wrong[0][0]} is missing or altered")
    if info.state.version != version:
        raise InvalidCheckpoint(
            f"{directory}: is of version {info.state.version}, not of {version}"
        )
    return info.state


def file_system(uri: str | Path) -> tuple[Any, str]:
    """Return the file system of fsspec behind a path or URL, and the path in it."""
    files, path = url_to_fs(str(uri))
    files.invalidate_cache()  # other processes write too
    return files, path.rstrip("/")


@contextmanager
def storage(uri: str | Path) -> Iterator[None]:
    """Raise StorageFailed instead of the errors of a file system."""
    try:
        yield
    except (MemoryError, FileExistsError, ForeseenError):
        raise
    # Each file system of fsspec raises errors of its own.
    except Exception as e:
        raise StorageFailed(f"{uri}: {type(e).__name__}: {e}") from e


def upload(source: Path, uri: str, info: DirectoryInfo) -> None:
    """Copy the directory of a version to a URL, clawstream.json first.

    An interrupted upload is completed: a file that is there in its full size is not copied again.

    Args:
        source: the directory.
        uri: of all versions.
        info: content of the directory.

    Raises:
        FileExistsError: another directory of the version is there already.
        StorageFailed: a file can't be copied.
    """
    target = f"{uri}/{info.state.version}"
    files, path = file_system(target)
    with storage(target):
        there = files.cat_file(f"{path}/{INFO}") if files.exists(f"{path}/{INFO}") else b""
        if not (source / INFO).read_bytes().startswith(there):
            raise FileExistsError(
                f"{target} is there already: another trainer of this run writes to the same place"
            )
        for name in (INFO, *sorted(info.files)):
            copy, size = f"{path}/{name}", (source / name).stat().st_size
            if not files.exists(copy) or files.size(copy) != size:
                files.makedirs(copy.rpartition("/")[0], exist_ok=True)
                files.put_file(str(source / name), copy)


def download(uri: str, root: Path, version: Version) -> VersionState:
    """Copy the directory of a version from a URL, check it, and put it in the place of the one
    here, if any.

    Args:
        uri: of all versions.
        root: of the directories on this machine.
        version: of the directory.

    Raises:
        InvalidCheckpoint: a file is missing, because the upload was interrupted, or altered.
        StorageFailed: a file can't be copied.
    """
    source, tmp = f"{uri}/{version}", temporary_directory(root, version)
    final = directory_of(root, version)
    files, path = file_system(source)
    with storage(source):
        try:
            for name in (INFO, *read_info(source).files):
                (tmp / name).parent.mkdir(parents=True, exist_ok=True)
                files.get_file(f"{path}/{name}", str(tmp / name))
        except FileNotFoundError as e:
            raise InvalidCheckpoint(f"{source}: a file is missing: {e}") from e
    state = verify(tmp, version)
    if final.exists():
        shutil.rmtree(final)
    _complete(tmp, final)
    return state


def versions_in(root: str | Path, run_id: str) -> dict[Version, str]:
    """Return the directories of a run, as paths in their file system.

    Raises:
        StorageFailed: they can't be listed.
    """
    found = {}
    for path, kind in _entries(root, run_id):
        if kind == "directory" and (match := _NAME.fullmatch(path.rpartition("/")[2])):
            found[Version(run_id, int(match[1]), int(match[2]))] = path
    return found


def _entries(root: str | Path, run_id: str) -> list[tuple[str, str]]:
    """Return path and type of what a run has."""
    files, path = file_system(f"{root}/{run_id}")
    with storage(f"{root}/{run_id}"):
        try:
            entries = files.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
    return sorted((entry["name"].rstrip("/"), entry["type"]) for entry in entries)


def delete_unpublished(
    root: str | Path,
    run_id: str,
    published: Collection[Version],
    weights_topic_id: str,
    check: Callable[[Position], object],
) -> tuple[list[Version], list[Version]]:
    """Delete what a killed trainer left: unfinished directories, and those whose version is not on
    this weights log.

    Directories of another weights log (the data of the broker was lost, for example) and unreadable
    ones are kept.

    Args:
        root: of the directories.
        run_id: of the trainer.
        published: versions on the weights log.
        weights_topic_id: of that log.
        check: called with the position of a directory before it is deleted; its error prevents the
            deletion.

    Returns:
        Deleted and kept versions. The ids of both are taken.

    Raises:
        StorageFailed: one can't be deleted.
    """
    files, _ = file_system(root)
    with storage(root):
        for path, _ in _entries(root, run_id):
            if path.rpartition("/")[2].startswith(_TMP):
                files.rm(path, recursive=True)
    deleted, foreign = [], []
    for version, directory in versions_in(root, run_id).items():
        if version in published:
            continue
        try:
            state = read_info(f"{root}/{version}").state
        except InvalidCheckpoint:
            state = None
        if state is None or state.weights_topic_id != weights_topic_id:
            foreign.append(version)
            continue
        check(state.position)
        logger().info("unpublished_directory_deleted", path=directory)
        with storage(directory):
            for path in files.ls(directory, detail=False):
                if path.rstrip("/") != f"{directory}/{INFO}":
                    files.rm(path, recursive=True)
            files.rm(directory, recursive=True)
        deleted.append(version)
    return deleted, foreign


def prune(root: str | Path, found: Mapping[Version, str], delete: Collection[Version]) -> None:
    """Delete the directories of versions, the newest first: a delta goes before its base.

    clawstream.json goes first, so a directory that a kill leaves half deleted is invalid.

    Args:
        root: of the directories.
        found: from `versions_in`.
        delete: versions; those without a directory are left out.

    Raises:
        StorageFailed: one can't be deleted.
    """
    files, _ = file_system(root)
    with storage(root):
        for version in sorted(found.keys() & set(delete), reverse=True):
            if files.exists(f"{found[version]}/{INFO}"):
                files.rm_file(f"{found[version]}/{INFO}")
            files.rm(found[version], recursive=True)
