"""Content-addressed blobs in a directory or an object store: `<uri>/<first two digits>/<sha256>`.

A blob is either complete or absent. On a disk it is written to a draft, fsynced and renamed, and
the directory is fsynced; object stores guarantee this themselves. Writing an existing blob changes
only its age, so concurrent writers and retries are harmless. Only an erasure deletes a blob, and
only an old one: a record that names a young blob may still be on its way. A `BlobStore` remembers
the young blobs, and does not ask the storage for them again.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

from clawstream.runtime.atomic_file import fsync_path, write_durably
from clawstream.runtime.errors import PlumbingError

RENEWED_S = 900.0
"""Age in seconds from which an object is written again; must stay far below an erasure's limit."""
REMEMBERED = 100_000
"""Young blobs that a store remembers; their digests take about 20 MB."""


class BlobStoreAway(PlumbingError):
    """The store could not be reached or did not write. Try again."""


class BlobMissing(PlumbingError):
    """The store has no such blob, or other bytes under its name. Trying again gives the same."""


class BlobStore:
    """One blob store; its calls block and are thread-safe.

    Args:
        uri: A path, file://, or any URL that fsspec supports.
        options: Options of fsspec, e.g. credentials.
        now: A monotonic clock in seconds.
    """

    def __init__(
        self,
        uri: str,
        options: Mapping[str, str] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        scheme, sep, rest = uri.partition("://")
        self._uri, self._options = uri.rstrip("/"), dict(options or {})
        self._directory = (
            Path(rest if sep else uri).absolute() if not sep or scheme == "file" else None
        )
        if self._directory is not None:
            self._uri = self._directory.as_uri()
        self._now, self._lock = now, Lock()
        # Digest to the time when its blob is RENEWED_S old. A plain dict finds its front by a
        # search past all earlier removals.
        self._old_at = OrderedDict[str, float]()

    def url_of(self, digest: str) -> str:
        """Where the bytes of a sha256 in hex are kept."""
        return f"{self._uri}/{digest[:2]}/{digest}"

    def put(self, data: bytes) -> str:
        """Keep bytes; durable when it returns their sha256. Raises BlobStoreAway."""
        digest, began = sha256(data).hexdigest(), self._now()
        if began < self._old_at.get(digest, float("-inf")):
            return digest
        age_s = 0.0
        try:
            if self._directory is not None:
                _write(self._file(digest), data)
            else:
                age_s = self._write_remote(digest, data)
        except MemoryError:
            raise
        except Exception as e:  # every file system of fsspec has errors of its own
            raise BlobStoreAway(f"blob {self.url_of(digest)}: {type(e).__name__}: {e}") from e
        with self._lock:
            self._old_at.pop(digest, None)  # so that the oldest knowledge comes first
            self._old_at[digest] = began + RENEWED_S - max(age_s, 0.0)
            if len(self._old_at) > REMEMBERED:
                self._old_at.popitem(last=False)
        return digest

    def get(self, digest: str) -> bytes:
        """The bytes. Raises BlobMissing or BlobStoreAway."""
        where = self.url_of(digest)
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise BlobMissing(f"{digest[:80]!r} is no sha256")
        try:
            if self._directory is not None:
                data = self._file(digest).read_bytes()
            else:
                fs, path = self._remote(digest)
                data = fs.cat_file(path)
        except FileNotFoundError as e:
            raise BlobMissing(f"no blob {where}") from e
        except MemoryError:
            raise
        except Exception as e:  # as above
            raise BlobStoreAway(f"blob {where}: {type(e).__name__}: {e}") from e
        if sha256(data).hexdigest() != digest:
            raise BlobMissing(f"blob {where} has other bytes than its name says")
        return data

    def age_s(self, digest: str) -> float:
        """Return the seconds since the last `put` of a sha256 in hex; infinity if it is not there.

        Raises:
            BlobStoreAway: The store could not be reached.
        """
        try:
            if self._directory is not None:
                written_at = self._file(digest).stat().st_mtime
            else:
                fs, path = self._remote(digest)
                written_at = fs.modified(path).timestamp()
        except FileNotFoundError:
            return float("inf")
        except MemoryError:
            raise
        except Exception as e:  # as above
            raise BlobStoreAway(f"blob {self.url_of(digest)}: {type(e).__name__}: {e}") from e
        return time.time() - written_at

    def delete(self, digest: str) -> None:
        """Delete the bytes of a sha256 in hex, if they are there. Raises BlobStoreAway."""
        with self._lock:
            self._old_at.pop(digest, None)
        try:
            if self._directory is not None:
                self._file(digest).unlink(missing_ok=True)
            else:
                fs, path = self._remote(digest)
                fs.rm_file(path)
        except FileNotFoundError:
            return
        except MemoryError:
            raise
        except Exception as e:  # as above
            raise BlobStoreAway(f"blob {self.url_of(digest)}: {type(e).__name__}: {e}") from e

    def _file(self, digest: str) -> Path:
        assert self._directory is not None
        return self._directory / digest[:2] / digest

    def _remote(self, digest: str) -> tuple[Any, str]:
        """Return the file system of fsspec, and the path of a blob there."""
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # only for those who keep blobs elsewhere

        fs, root = url_to_fs(self._uri, **self._options)
        return fs, f"{root.rstrip('/')}/{digest[:2]}/{digest}"

    def _write_remote(self, digest: str, data: bytes) -> float:
        """Write an object unless it is young; return its age in seconds."""
        fs, path = self._remote(digest)
        try:
            known = fs.info(path)["size"] == len(data)
            age_s: float = time.time() - fs.modified(path).timestamp()
            if known and age_s < RENEWED_S:
                return age_s
        except FileNotFoundError:
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        except NotImplementedError:
            pass  # a file system that does not report ages: write the object each time
        fs.pipe_file(path, data)  # an existing one too: this renews its age
        return 0.0


def _write(path: Path, data: bytes) -> None:
    with suppress(FileNotFoundError, PermissionError):  # another user's: replaced below
        os.utime(path)
        fsync_path(path.parent)  # another one may have just written it
        return
    if not path.parent.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        fsync_path(path.parent.parent)
        fsync_path(path.parent.parent.parent)
    write_durably(path, data)
