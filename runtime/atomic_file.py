"""Write files atomically and durably: to a draft beside the target, fsync, then rename."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def is_full(error: OSError) -> bool:
    """Return whether a write failed for lack of space (disk, quota or file size limit).

    Such a write may succeed later.
    """
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
    """Yield a hidden file beside `path` that contains these bytes and is fsynced.

    The file is removed at the end of the block unless the caller has moved it.

    Args:
        path: The target; its directory exists.
        data: The content, whole or in chunks.
        mode: Permission bits before the umask.
    """
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
    """Create or replace a file atomically; the file is durable on return.

    Args:
        path: The target; its directory exists.
        data: The content; chunks if it should not be in memory twice.
        mode: Permission bits before the umask.

    Raises:
        OSError: The file cannot be written.
    """
    with fsynced_draft(path, data, mode) as draft:
        draft.replace(path)
    fsync_path(path.parent)


def create_durably(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Create a file as `write_durably` does; of several concurrent creators exactly one succeeds.

    Raises:
        FileExistsError: The file exists.
        OSError: The file cannot be written.
    """
    with fsynced_draft(path, data, mode) as draft:
        try:
            os.link(draft, path)
        finally:
            fsync_path(path.parent)  # another one who has just made it may not have come so far
