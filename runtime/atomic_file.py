"""Files that are whole or not there, and stay there after a loss of power: written beside their place, fsynced, moved into it."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def is_full(error: OSError) -> bool:
    """Whether a write failed for want of room: of the disk, of a quota, or of a limit on the size of files. It may succeed later."""
    return error.errno in _FULL


def fsync_path(path: Path) -> None:
    """A file's bytes, or a directory's names, onto the disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def fsynced_draft(path: Path, data: bytes | Iterable[bytes], mode: int = 0o666) -> Iterator[Path]:
    """A hidden file beside `path` with these bytes, on disk; gone at the end of the block unless it was moved. mode: less the umask."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(fd, "wb") as file:
            file.writelines((data,) if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(fd)
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def write_durably(path: Path, data: bytes | Iterable[bytes], mode: int = 0o666) -> None:
    """Put a file in its place, or replace it, as a whole: durable when this returns. The directory is there. Raises OSError.

    data: what does not fit into memory twice comes piece by piece.
    """
    with fsynced_draft(path, data, mode) as draft:
        draft.replace(path)
    fsync_path(path.parent)


def create_durably(path: Path, data: bytes, mode: int = 0o666) -> None:
    """As `write_durably`, where no file may be there yet: of several that try at once one makes it. Raises FileExistsError, OSError."""
    with fsynced_draft(path, data, mode) as draft:
        try:
            os.link(draft, path)
        finally:
            fsync_path(path.parent)  # another one who has just made it may not have come so far
