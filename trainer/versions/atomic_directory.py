"""Directories named `<sync index>.<attempt>` that are there completely or not at all: checkpoints
and published weights.

1. everything is written into `.tmp-<name>-<pid>` beside the final place
2. each file is synced to disk, then the directories
3. one rename makes it real, and the parent is synced

A process killed before 3 leaves only a `.tmp-` directory, which the next start deletes. Every
directory has `clawstream.json`, which says what it is and in which weights log (topic id) its
version would be.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime.atomic_file import fsync_path
from runtime.logs import logger
from schemas.ids import Version
from trainer.errors import InvalidCheckpoint

INFO = "clawstream.json"
_NAME = re.compile(r"(\d{1,18})\.(\d{1,18})")
_TMP = ".tmp-"
_READ_BYTES = 4 * 1024 * 1024


def directory_of(root: Path, version: Version) -> Path:
    """Where the version's directory is, `root/<run>/<sync index>.<attempt>`."""
    return root / version.run_id / f"{version.sync_index}.{version.attempt}"


@contextmanager
def new_directory(final: Path, info: Mapping[str, Any]) -> Iterator[Path]:
    """A directory to fill, which becomes `final` at the end of the block.

    Raises FileExistsError when final is there.
    """
    if final.exists():
        raise FileExistsError(
            f"{final} is there already: another trainer of this run writes to the same place"
        )
    tmp = final.with_name(f"{_TMP}{final.name}-{os.getpid()}")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    yield tmp
    (tmp / INFO).write_text(json.dumps({**info, "files": digests(tmp)}, indent=1))
    for path in (*tmp.rglob("*"), tmp):
        fsync_path(path)
    tmp.rename(final)
    fsync_path(final.parent)


def digests(directory: Path) -> dict[str, str]:
    """Path within the directory to sha256, of every file but clawstream.json."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != INFO)
    return {str(path.relative_to(directory)): sha256(path) for path in files}


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as data:
        while block := data.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def read_info(directory: Path) -> dict[str, Any]:
    """What clawstream.json says.

    Raises InvalidCheckpoint when it is not there or no JSON object.
    """
    try:
        info = json.loads((directory / INFO).read_text())
    except (OSError, ValueError) as e:
        raise InvalidCheckpoint(f"{directory}: {INFO} can't be read: {e}") from e
    if not isinstance(info, dict):
        raise InvalidCheckpoint(f"{directory}: {INFO} is no JSON object")
    return info


def verify(directory: Path) -> dict[str, Any]:
    """The info of a directory whose files are all what was written. Raises InvalidCheckpoint."""
    info = read_info(directory)
    found = digests(directory)
    if found != info.get("files"):
        wrong = sorted(set(found.items()) ^ set((info.get("files") or {}).items()))
        raise InvalidCheckpoint(
            f"{directory}: {wrong[0][0] if wrong else 'every file'} is missing or altered"
        )
    return info


def versions_in(root: Path, run_id: str) -> dict[Version, Path]:
    """The complete directories of a run."""
    found = {}
    for path in sorted((root / run_id).glob("*")):
        if (match := _NAME.fullmatch(path.name)) and path.is_dir():
            found[Version(run_id, int(match[1]), int(match[2]))] = path
    return found


def sweep(
    root: Path,
    run_id: str,
    published: Collection[Version],
    weights_topic_id: str,
    check: Callable[[Mapping[str, Any]], None],
) -> tuple[list[Version], list[Version]]:
    """Delete what a killed trainer left: unfinished directories, and those whose version never came
    onto this weights log.

    Directories of another weights log (the broker's data was wiped, say) are kept. Returns
    (deleted, kept): the ids of both are taken. check: called with what clawstream.json says before
    a directory is deleted; what it raises stops that.
    """
    for tmp in (root / run_id).glob(f"{_TMP}*"):
        shutil.rmtree(tmp)
    deleted, foreign = [], []
    for version, path in versions_in(root, run_id).items():
        if version in published:
            continue
        try:
            info = read_info(path)
        except InvalidCheckpoint:
            info = {}  # not written by us as it is now: never deleted
        if info.get("weights_topic_id") == weights_topic_id:
            check(info)
            logger().info("unpublished_directory_deleted", path=str(path))
            shutil.rmtree(path)
            deleted.append(version)
        else:
            foreign.append(version)
    return deleted, foreign


def prune(root: Path, run_id: str, delete: Collection[Version]) -> None:
    """Delete the directories of these versions.

    One that is half deleted by a kill has no clawstream.json any more.
    """
    for version, path in versions_in(root, run_id).items():
        if version in delete:
            (path / INFO).unlink(missing_ok=True)
            shutil.rmtree(path)
