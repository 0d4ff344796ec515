"""The files of versions on a worker's machine: copies of adapters, and what is removed."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from clawstream.runtime.errors import WeightsUnreadable

ADAPTERS = "adapters"


def adapter_files(version_id: str, verified: Iterable[Path], cache_dir: Path) -> list[Path]:
    """Copy the files of an adapter into one directory of its version, as an engine needs them.

    Returns:
        The copies.

    Raises:
        WeightsUnreadable: The files can't be copied now.
    """
    directory = cache_dir / ADAPTERS / _directory_name(version_id)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.copyfile(path, directory / path.name)) for path in verified]
    except OSError as error:
        raise WeightsUnreadable(f"{version_id}: {error}") from error


def remove_others(digests: Collection[str], held: Collection[str] | None, cache_dir: Path) -> None:
    """Remove downloaded and rebuilt files that are not needed any more.

    Args:
        digests: SHA-256 of the files that are kept: those of the loaded version, to which the next
            delta is applied, and those of a version that is tried again.
        held: versions whose adapters the engine holds. The copies of others are removed; None: no
            copy is.
        cache_dir: of the worker.
    """
    kept = {ADAPTERS, *digests}
    for path in cache_dir.glob("*"):
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)
    if held is None:
        return
    adapters = {_directory_name(version_id) for version_id in held}
    for path in (cache_dir / ADAPTERS).glob("*"):
        if path.name not in adapters:
            shutil.rmtree(path, ignore_errors=True)


def _directory_name(version_id: str) -> str:
    return version_id.replace("/", "@")
