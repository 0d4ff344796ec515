"""Get the files of a weight version: checked, downloaded where necessary, deltas applied.

The files of a version are those of the last full version, then the deltas since then in order.
Downloaded and rebuilt files are in a cache directory as `<sha256>/<name>`, so a version is rebuilt
from the newest one that is in the cache, else from the full one.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from clawstream.runtime.digests import SHA256, sha256
from clawstream.runtime.errors import WeightsUnreadable
from clawstream.schemas.records import WeightFile

if TYPE_CHECKING:  # numpy is imported only where there are deltas
    from clawstream.runtime.weights.delta import DeltaFile

SUFFIX = ".delta"
"""Of the name of a delta file."""
_READ_BYTES = 4 * 1024 * 1024


def local_path(url: str) -> Path | None:
    """Return the path of a file URL or a plain path; None for other URLs."""
    parts = urlsplit(url)
    if parts.scheme not in ("", "file"):
        return None
    return Path(unquote(parts.path) if parts.scheme else url).absolute()


def get_files(files: Sequence[WeightFile], cache_dir: Path) -> dict[Path, str]:
    """Return the files of a version on this machine: the content of a full version, bit for bit.

    Args:
        files: of the version's manifest.
        cache_dir: for files that are downloaded or rebuilt. One process uses it.

    Returns:
        Path and SHA-256 (hex) of each file. Each was checked.

    Raises:
        WeightsUnreadable: A file is missing, can't be read, or isn't what the manifest or its delta
            says; or its name or digest can't be part of a path.
    """
    for file in files:
        if _name(file) in ("", "..") or not re.match(SHA256, file.sha256):
            raise WeightsUnreadable(f"{file.url!r} with sha256 {file.sha256!r}: not a file's")
    deltas = [file for file in files if _name(file).endswith(SUFFIX)]
    whole = {_name(file): file for file in files if file not in deltas}
    try:
        rebuilt = _rebuilt(whole, deltas, cache_dir) if deltas else {}
        found = {path: path.parent.name for path in rebuilt.values()}
        return found | {
            _get(file, cache_dir): file.sha256
            for name, file in whole.items()
            if name not in rebuilt
        }
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        raise WeightsUnreadable(str(error)) from error


def _rebuilt(
    whole: Mapping[str, WeightFile], deltas: Sequence[WeightFile], cache_dir: Path
) -> dict[str, Path]:
    """Return the tensor files after the last delta, by name."""
    from clawstream.runtime.weights.delta import DeltaFile

    newest = DeltaFile(_get(deltas[-1], cache_dir))
    if unknown := newest.index.result.keys() - whole.keys():
        raise WeightsUnreadable(f"{deltas[-1].url}: the version has no file {unknown}")
    targets = _cached(newest.index.result, cache_dir)
    if all(path.exists() and sha256(path) == path.parent.name for path in targets.values()):
        return targets
    chain, bases = [newest], _cached(newest.index.base, cache_dir)
    for file in reversed(deltas[:-1]):
        if all(path.exists() for path in bases.values()):
            break
        chain.insert(0, DeltaFile(_get(file, cache_dir)))
        if chain[0].index.result != chain[1].index.base:
            raise WeightsUnreadable(f"{file.url} doesn't lead to the base of {chain[1].path}")
        bases = _cached(chain[0].index.base, cache_dir)
    if not all(path.exists() for path in bases.values()):
        if any(whole[name].sha256 != sha for name, sha in chain[0].index.base.items()):
            raise WeightsUnreadable(f"the full version is not the base of {chain[0].path}")
        bases = {name: _get(whole[name], cache_dir) for name in targets}
    for name, target in targets.items():
        _rebuild(name, bases[name], chain, target, cache_dir)
    return targets


def _rebuild(
    name: str, base: Path, chain: Sequence[DeltaFile], target: Path, cache_dir: Path
) -> None:
    """Write a tensor file. It gets its name only once its digest is right."""
    from clawstream.runtime.weights.delta import rebuild

    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(name + ".part")
    try:
        with part.open("wb") as data:
            rebuild(name, base, chain, data)
    except WeightsUnreadable:
        part.unlink()
        if base.resolve().is_relative_to(cache_dir.resolve()):
            base.unlink()  # it may be damaged: the next try begins with an older one
        raise
    part.rename(target)


def _cached(digests: Mapping[str, str], cache_dir: Path) -> dict[str, Path]:
    """Return the places of files in the cache, by name."""
    return {name: cache_dir / digest / name for name, digest in digests.items()}


def _get(file: WeightFile, cache_dir: Path) -> Path:
    """Return a checked file, downloaded if it is elsewhere. Raises WeightsUnreadable."""
    path = local_path(file.url)
    if path is None:
        path = cache_dir / file.sha256 / _name(file)
        if not path.exists() or _difference(file, path):
            _download(file, path)
    elif problem := _difference(file, path):
        raise WeightsUnreadable(problem)
    return path


def _download(file: WeightFile, path: Path) -> None:
    """Download a file by fsspec. It gets its name only once size and digest are right."""
    import fsspec  # type: ignore[import-untyped]  # only where files are elsewhere

    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with fsspec.open(file.url, "rb") as source, part.open("wb") as target:
            shutil.copyfileobj(source, target, _READ_BYTES)
    except MemoryError:
        raise
    except Exception as error:  # every file system of fsspec has errors of its own
        raise WeightsUnreadable(f"{file.url}: {type(error).__name__}: {error}") from error
    if problem := _difference(file, part):
        part.unlink()
        raise WeightsUnreadable(problem)
    part.rename(path)


def _difference(file: WeightFile, path: Path) -> str | None:
    """Describe how a file differs from the manifest; None when they are the same."""
    size, digest = path.stat().st_size, sha256(path)
    if (size, digest) == (file.size_bytes, file.sha256):
        return None
    return (
        f"{file.url}: {size} bytes with sha256 {digest}, the manifest says {file.size_bytes} with "
        f"{file.sha256}"
    )


def _name(file: WeightFile) -> str:
    return Path(unquote(urlsplit(file.url).path)).name
