"""Find files of a table that cannot be read: its Delta log and its data files.

Needs no Delta library. Parquet files carry no checksums: a changed byte is found only where it
breaks the format, a compressed page or a text, not where it turns one number into another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from clawstream.stream_jobs.lake.delta.log import first_line, is_store_away

LOG = "_delta_log"


@dataclass(frozen=True, slots=True)
class FileDamage:
    """A file that cannot be read.

    file: path inside the table. version: of the commit or checkpoint; None: a data file.
    """

    file: str
    problem: str
    version: int | None = None

    def __str__(self) -> str:
        return f"{self.file} {self.problem}"

    @property
    def is_checkpoint(self) -> bool:
        return self.file.endswith(".checkpoint.parquet")


def damaged_log_files(table: pafs.FileSystem) -> list[FileDamage]:
    """Return unreadable checkpoints and commits, and missing commits, by version."""
    listed = table.get_file_info(pafs.FileSelector(LOG, allow_not_found=True))
    names = sorted(f.base_name for f in listed if f.is_file)
    checkpoints = {v: n for n in names if (v := _version(n, ".checkpoint.parquet")) is not None}
    commits = {v: n for n in names if (v := _version(n, ".json")) is not None}
    found = [
        FileDamage(f"{LOG}/{name}", f"can't be read: {why}", version)
        for version, name in [*checkpoints.items(), *commits.items()]
        if (why := _why_unreadable(table, f"{LOG}/{name}")) is not None
    ]
    first, last = min(commits, default=0), max(commits, default=-1)
    found += [
        FileDamage(commit_path(v), "is missing", v) for v in range(first, last) if v not in commits
    ]
    return sorted(found, key=lambda damage: (damage.version or 0, not damage.is_checkpoint))


def commit_path(version: int) -> str:
    """Return the path of the commit of a version inside the table."""
    return f"{LOG}/{version:020d}.json"


def _version(name: str, suffix: str) -> int | None:
    number = name.removesuffix(suffix)
    return int(number) if name.endswith(suffix) and number.isdecimal() else None


def _why_unreadable(table: pafs.FileSystem, path: str) -> str | None:
    try:
        if path.endswith(".json"):
            with table.open_input_stream(path) as stream:
                for line in stream.read().splitlines():
                    json.loads(line)
        else:
            _decode(table, path)
    except (ValueError, pa.ArrowException, OSError) as e:  # ValueError: invalid JSON or UTF-8
        if is_store_away(e):
            raise
        return first_line(e)
    return None


def damaged_files(
    table: pafs.FileSystem, sizes: Mapping[str, int], whole: bool = True
) -> Iterator[FileDamage]:
    """Yield data files that are missing, of the wrong size or not decodable.

    Args:
        sizes: path to size in bytes, according to the log.
        whole: decode each file to its end; else compare sizes only.
    """
    infos = table.get_file_info(list(sizes))
    present = []
    for info, (path, size) in zip(infos, sizes.items(), strict=True):
        if not info.is_file:
            yield FileDamage(path, "is missing")
        elif info.size != size:
            yield FileDamage(path, f"has {info.size} bytes, the log says {size}")
        else:
            present.append(path)
    for path in present if whole else ():
        why = _why_unreadable(table, path)
        if why is not None:
            yield FileDamage(path, f"can't be read: {why}")


def _decode(table: pafs.FileSystem, path: str) -> None:
    with table.open_input_file(path) as file:
        for batch in pq.ParquetFile(file).iter_batches(batch_size=4096):
            batch.validate(full=True)


def adders_of(table: pafs.FileSystem, paths: frozenset[str]) -> dict[str, int]:
    """Return the version whose commit added each data file, as far as the log goes back."""
    found: dict[str, int] = {}
    listed = table.get_file_info(pafs.FileSelector(LOG, allow_not_found=True))
    for name in sorted(f.base_name for f in listed if f.is_file):
        version = _version(name, ".json")
        if version is None:
            continue
        with table.open_input_stream(f"{LOG}/{name}") as stream:
            for line in stream.read().splitlines():
                path = json.loads(line).get("add", {}).get("path")
                if path in paths:
                    found[path] = version
    return found
