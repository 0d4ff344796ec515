"""Search the requests and replies of a lake that is being written.

`TextIndex` follows the files of a table of steps: it reads each new file once, in the background,
and has a `Segment` for a file or for some small ones. When files are replaced (merged, erased,
expired), the segments of the old ones answer until the new ones are read, and are deleted then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from clawstream.runtime.logs import logger
from clawstream.runtime.process.lifecycle import die
from clawstream.search.segment import FOUND, Document, Error, Segment
from clawstream.search.texts import texts_of
from clawstream.search.words import Term, terms_of
from clawstream.stream_jobs.errors import SqlError

IDLE_S = 30.0
"""After this time without a newer snapshot the index looks for one, and tries a file again that
could not be read."""
STOP_S = 2.0
"""Longest wait for the end of a read."""
_COLUMNS = ["run_id", "trajectory_key", "request_json", "response_json"]
_BATCH_ROWS = 128
_BUFFER_BYTES = 1 << 20
_DOCUMENTS_CHARACTERS = 16 << 20
"""Texts in memory. A text that steps of a trajectory repeat among them is indexed once."""
_SMALL_ROWS = 20_000
"""Small files share a segment of at most as many rows; smaller segments are merged."""
_MERGED_AT_ONCE = 16
"""Segments of a similar size that become one."""


class _Part(NamedTuple):
    """A segment, the files that it has, and their rows."""

    segment: Segment
    files: frozenset[str]
    rows: int


class _Stopped(Exception):
    """The index is stopped while a segment is built."""


class TextIndex:
    """The full-text index of a table of steps. Thread-safe.

    Args:
        timeout_s: longest time of a search.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._files: dict[str, Any] = {}
        self._rows: dict[str, int] = {}
        self._unreadable = set[str]()
        self._parts: list[_Part] = []

    def start(self, refresh: Callable[[], object]) -> None:
        """Read new files in a thread of its own from now on.

        Args:
            refresh: looks for a newer snapshot and passes its files to `follow`. It is called while
                nobody else does, so that what is erased leaves the index.
        """
        self._thread = threading.Thread(
            target=self._run, args=(refresh,), name="text-index", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread and delete the index; later searches find nothing."""
        self._stopped = True
        self._changed.set()
        if self._thread is not None:
            self._thread.join(STOP_S)
        with self._lock:
            self._drop(self._parts)

    def follow(self, files: Mapping[str, Any]) -> None:
        """Take the files of a newer snapshot.

        Args:
            files: path to fragment of an Arrow dataset.
        """
        rows = {p: self._rows[p] if p in self._rows else f.count_rows() for p, f in files.items()}
        with self._lock:
            self._files, self._rows = dict(files), rows
            self._unreadable.clear()
        self._changed.set()

    def find(self, search: str) -> tuple[list[pa.Table], float]:
        """Return run and key of the trajectories with each term, and the indexed share of the rows.

        A trajectory may come several times in a table. A search without a word finds nothing. Rows
        of replaced files count for those of the new files until these are read.

        Raises:
            SqlError: It takes too long.
        """
        until = time.monotonic() + self._timeout_s
        with self._lock:
            found = [self._with_term(term, until) for term in terms_of(search)]
            total, indexed = sum(self._rows.values()), sum(part.rows for part in self._parts)
        return found or [FOUND.empty_table()], min(1.0, indexed / total) if total else 1.0

    def _with_term(self, term: Term, until: float) -> pa.Table:
        if time.monotonic() > until:
            raise SqlError(
                f"the search took longer than {self._timeout_s:g} s: search for fewer words"
            )
        found = [part.segment.find(term) for part in self._parts]
        return pa.concat_tables([FOUND.empty_table(), *found])

    def catch_up(self) -> None:
        """Index all files of the newest snapshot, and nothing else."""
        while not self._stopped and (files := self._next()):
            self._build(files)

    def _run(self, refresh: Callable[[], object]) -> None:
        try:
            while not self._stopped:
                self.catch_up()
                if not self._changed.wait(IDLE_S):
                    with self._lock:
                        self._unreadable.clear()
                    refresh()
                self._changed.clear()
        except Exception as error:  # noqa: BLE001 - searches would miss new calls for ever
            die(error)

    def _next(self) -> dict[str, Any]:
        """Return the files of the next segment; none: all is indexed. Drops what is replaced."""
        with self._lock:
            present = [part for part in self._parts if part.files <= self._files.keys()]
            indexed = frozenset[str]().union(*(part.files for part in present))
            missing = self._files.keys() - indexed - self._unreadable
            if missing:
                names = self._small(missing)
            else:
                self._drop([part for part in self._parts if part not in present])
                names = _mergeable([p for p in self._parts if not p.files & self._unreadable])
            return {name: self._files[name] for name in names}

    def _small(self, names: Collection[str]) -> list[str]:
        """Return the smallest file, and the next ones while they fit into a segment with it."""
        chosen, rows = list[str](), 0
        for name in sorted(names, key=self._rows.__getitem__):
            rows += self._rows[name]
            if chosen and rows > _SMALL_ROWS:
                break
            chosen.append(name)
        return chosen

    def _build(self, files: Mapping[str, Any]) -> None:
        """Index some files in one segment, in place of the segments of these files."""
        unreadable = set[str]()
        try:
            segment = Segment(self._documents(files, unreadable))
        except _Stopped:
            return
        except Error as e:
            logger().warning("full_text_not_indexed", files=len(files), error=str(e))
            with self._lock:
                self._unreadable.update(files)
            return
        done = frozenset(files.keys() - unreadable)
        with self._lock:
            self._unreadable |= unreadable & self._files.keys()
            self._drop([part for part in self._parts if part.files <= done])
            rows = sum(self._rows.get(name, 0) for name in done)
            self._parts.append(_Part(segment, done, rows))
            if self._stopped or not done:
                self._drop(self._parts[-1:])

    def _drop(self, parts: Collection[_Part]) -> None:
        self._parts = [part for part in self._parts if part not in parts]
        for part in parts:
            part.segment.close()

    def _documents(self, files: Mapping[str, Any], unreadable: set[str]) -> Iterator[Document]:
        """Yield the texts of the files; adds files that cannot be read to `unreadable`."""
        texts: dict[tuple[str, str], dict[str, None]] = {}
        size = 0
        for name, fragment in files.items():
            try:
                for run_id, key, request, response in _rows(fragment):
                    known = texts.setdefault((run_id, key), {})
                    for text in texts_of(request, response):
                        if text not in known:
                            known[text] = None
                            size += len(text)
                    if size > _DOCUMENTS_CHARACTERS:
                        yield from self._until_stopped(texts)
                        texts, size = {}, 0
            except (pa.ArrowException, OSError) as e:
                logger().warning("full_text_not_indexed", file=name, error=str(e))
                unreadable.add(name)
        yield from self._until_stopped(texts)

    def _until_stopped(
        self, texts: Mapping[tuple[str, str], Collection[str]]
    ) -> Iterator[Document]:
        for (run_id, key), found in texts.items():
            if self._stopped:
                raise _Stopped
            yield Document(run_id, key, found)


def _rows(fragment: Any) -> Iterator[tuple[str, str, str | None, str | None]]:
    """Yield the rows of a file. A fragment's own reader would decode whole row groups."""
    with fragment.open() as file, pq.ParquetFile(file, buffer_size=_BUFFER_BYTES) as parquet:
        for batch in parquet.iter_batches(_BATCH_ROWS, columns=_COLUMNS, use_threads=False):
            yield from zip(*(batch.column(name).to_pylist() for name in _COLUMNS), strict=True)


def _mergeable(parts: Collection[_Part]) -> list[str]:
    """Return the files of the segments to merge, if there are enough small ones."""
    small = [part for part in parts if part.rows < _SMALL_ROWS]
    for _, similar in groupby(sorted(small, key=_magnitude), _magnitude):
        some = list(similar)[:_MERGED_AT_ONCE]
        if len(some) == _MERGED_AT_ONCE:
            return [name for part in some for name in part.files]
    return []


def _magnitude(part: _Part) -> int:
    """Return the size of a segment: the next one has 16 times as many rows."""
    return part.rows.bit_length() // 4
