"""Write the selected trajectories of the lake to a directory in one format.

1. The Delta versions are resolved; everything is read at these versions.
2. The rows stream from the lake to the format's writer, one chunk of trajectories at a time, into a
   hidden directory beside the target.
3. `provenance.json` is written, and the directory gets its name. So a directory with that name is
   complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from clawstream.export.errors import ExportError
from clawstream.export.formats.registry import FORMATS, open_writer
from clawstream.export.provenance import SIDECAR, Provenance, sidecar
from clawstream.export.row import ExportRow
from clawstream.export.rows import Counts, chat_rows, token_rows
from clawstream.export.selection import Selection
from clawstream.runtime.atomic_file import fsync_path
from clawstream.runtime.blob_store import BlobStore
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.lake.delta.snapshots import find_snapshot, take_snapshot


def export(
    settings: Settings,
    form: str,
    target: Path,
    where: str = "",
    at: str | None = None,
) -> tuple[Provenance, Counts]:
    """Export the trajectories that a condition selects.

    Args:
        form: a name of `FORMATS`.
        target: directory to create.
        where: see `Selection`.
        at: a named snapshot or a time; None: the newest versions.

    Raises:
        ExportError: the target exists, or the condition selects nothing that the format can have.
        SqlError, LakeError: from the lake.
    """
    if target.exists():
        raise ExportError(f"{target} exists: name a directory that does not exist yet")
    state = take_snapshot(settings) if at is None else find_snapshot(settings, at)
    versions = state["versions"]
    provenance = Provenance(
        lake=settings.lake_uri,
        at=state["at"],
        versions={name: version for name, version in versions.items() if version is not None},
        where=where,
        format=form,
    )
    draft = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        counts = _write(settings, provenance, draft)
        (draft / SIDECAR).write_bytes(sidecar(provenance, counts, draft))
        for path in (*draft.rglob("*"), draft):
            fsync_path(path)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    fsync_path(target.parent)
    return provenance, counts


def _write(settings: Settings, provenance: Provenance, directory: Path) -> Counts:
    counts = Counts()
    with Selection(settings, provenance.versions, provenance.where) as selection:
        writer = open_writer(provenance.format, directory)
        try:
            for row in _rows(settings, selection, FORMATS[provenance.format].with_tokens, counts):
                reason = writer.write(row)
                if reason is None:
                    counts.add(row)
                else:
                    counts.skipped[reason] += 1
        finally:  # also after an error: the directory is deleted, but its files must not stay open
            writer.close(provenance.as_json(counts))
    if not counts.rows:
        skipped = ", ".join(f"{n} {reason}" for reason, n in counts.skipped.items())
        raise ExportError(
            f"nothing to export: {counts.trajectories} trajectories selected; "
            f"skipped: {skipped or 'none'}"
        )
    return counts


def _rows(
    settings: Settings, selection: Selection, with_tokens: bool, counts: Counts
) -> Iterator[ExportRow]:
    get_blob = BlobStore(settings.blob_uri, settings.gateway.blob_options).get
    make = token_rows if with_tokens else chat_rows
    for selected in selection.trajectories():
        counts.trajectories += 1
        yield from make(selected, get_blob, counts)
