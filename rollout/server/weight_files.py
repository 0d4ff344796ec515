"""Find or download the files of a weight version, check them, and remove old downloads."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from rollout.errors import InvalidWeights, WeightsUnreadable
from schemas.records import WeightFile

_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Reading again would find the same; any other error of a file system may pass."""
ADAPTERS = "adapters"
_READ_BYTES = 4 * 1024 * 1024


def verify(files: Sequence[WeightFile], cache_dir: Path) -> dict[Path, str]:
    """Find each file of a version on this machine, or download it into `cache_dir`, and check it.

    Returns:
        Local path and sha256 (hex) of each file.

    Raises:
        InvalidWeights: A file is absent, or differs from the manifest.
        WeightsUnreadable: A file can't be read now, or its download ended early.
    """
    found: dict[Path, str] = {}
    for file in files:
        parts = urlsplit(file.url)
        if parts.scheme in ("", "file"):
            path = Path(unquote(parts.path) if parts.scheme else file.url).resolve()
            problem = _read(file, path)
            if problem:
                raise InvalidWeights(problem)
        else:
            path = cache_dir / file.sha256 / Path(parts.path).name
            if not path.exists() or _read(file, path):
                _fetch(file, path)
        found[path] = file.sha256
    return found


def adapter_files(
    version_id: str, verified: Mapping[Path, str], cache_dir: Path
) -> dict[Path, str]:
    """Copy the files of an adapter into one directory of its version, as an engine needs them.

    Returns:
        The copies and their sha256 (hex).

    Raises:
        WeightsUnreadable: The files can't be copied now.
    """
    directory = cache_dir / ADAPTERS / _directory_name(version_id)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return {
            Path(shutil.copyfile(path, directory / path.name)): sha256
            for path, sha256 in verified.items()
        }
    except OSError as error:
        raise WeightsUnreadable(f"{version_id}: {error}") from error


def remove_others(files: Sequence[WeightFile], held: Collection[str], cache_dir: Path) -> None:
    """Remove downloads but those of `files`, and copies of adapters that are not held.

    Args:
        files: Of the loaded version.
        held: Versions whose adapters the engine holds.
        cache_dir: Of the worker.
    """
    kept = {ADAPTERS, *(file.sha256 for file in files)}
    adapters = {_directory_name(version_id) for version_id in held}
    for path in cache_dir.glob("*"):
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)
    for path in (cache_dir / ADAPTERS).glob("*"):
        if path.name not in adapters:
            shutil.rmtree(path, ignore_errors=True)


def _directory_name(version_id: str) -> str:
    return version_id.replace("/", "@")


def _read(file: WeightFile, path: Path) -> str | None:
    """Describe how the bytes at `path` differ from the manifest; None when they are the same."""
    try:
        with path.open("rb") as data:
            return _difference(file, *_digest(data))
    except _ABSENT as error:
        raise InvalidWeights(f"{file.url}: {error}") from error
    except OSError as error:
        raise WeightsUnreadable(f"{file.url}: {error}") from error


def _fetch(file: WeightFile, path: Path) -> None:
    """Download a file by fsspec. It gets its name only once size and digest are right."""
    import fsspec  # type: ignore[import-untyped]

    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with fsspec.open(file.url, "rb") as source, part.open("wb") as target:
            size, digest = _digest(source, target)
    except (*_ABSENT, ValueError, ImportError) as error:
        raise InvalidWeights(f"{file.url}: {error}") from error
    except OSError as error:
        raise WeightsUnreadable(f"{file.url}: {error}") from error
    problem = _difference(file, size, digest)
    if problem is None:
        part.rename(path)
        return
    part.unlink()
    if size < file.size_bytes:
        raise WeightsUnreadable(f"{problem}: the download ended early")
    raise InvalidWeights(problem)


def _digest(source: BinaryIO, target: BinaryIO | None = None) -> tuple[int, str]:
    """Read `source` to its end, copying it into `target`. Returns its size in bytes and sha256."""
    size, digest = 0, hashlib.sha256()
    while block := source.read(_READ_BYTES):
        size += len(block)
        digest.update(block)
        if target is not None:
            target.write(block)
    return size, digest.hexdigest()


def _difference(file: WeightFile, size: int, sha256: str) -> str | None:
    if (size, sha256) == (file.size_bytes, file.sha256):
        return None
    return (
        f"{file.url}: {size} bytes with sha256 {sha256}, the manifest says {file.size_bytes} with "
        f"{file.sha256}"
    )
