"""What an export was made of: Delta versions, condition, counts and files.

`--as-of` its time `at` reads the tables at the versions of the export again, as long as these
versions can be read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any

from clawstream.export.rows import Counts

SIDECAR = "provenance.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The origin of an export.

    Attributes:
        lake: URI of the lake.
        at: UTC time of the state of the lake, ISO 8601.
        versions: table to Delta version; a table that is absent did not exist.
        where: SQL condition; empty: all trajectories.
    """

    lake: str
    at: str
    versions: Mapping[str, int]
    where: str
    format: str

    def as_json(self, counts: Counts) -> str:
        """Return the provenance with these counts, for the metadata of a file."""
        return json.dumps({**asdict(self), "counts": _counts(counts)}, ensure_ascii=False)


def sidecar(provenance: Provenance, counts: Counts, directory: Path) -> bytes:
    """Return the content of `provenance.json`, with size and sha256 of each file."""
    files = sorted(p for p in directory.rglob("*") if p.is_file() and p.name != SIDECAR)
    found = {
        **asdict(provenance),
        "counts": _counts(counts),
        "files": [
            {
                "name": str(path.relative_to(directory)),
                "size_bytes": path.stat().st_size,
                "sha256": _sha256(path),
            }
            for path in files
        ],
    }
    return (json.dumps(found, ensure_ascii=False, indent=1) + "\n").encode()


def _counts(counts: Counts) -> dict[str, Any]:
    return {**asdict(counts), "skipped": dict(sorted(counts.skipped.items()))}


def _sha256(path: Path) -> str:
    with path.open("rb") as data:
        return file_digest(data, "sha256").hexdigest()
