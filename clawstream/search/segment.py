"""A part of the full-text index: a table of SQLite's FTS5 in a temporary file without a name.

The table is contentless: it has the words of documents and their positions, not the texts. SQLite
removes the name of the file when it opens it, so the file ends with the connection or the process,
however that ends.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from clawstream.search.words import Term, plain

Error = sqlite3.Error
"""For example when the file system of the temporary directory is full."""
FOUND = pa.schema({"run_id": pa.string(), "trajectory_key": pa.string()})
_BETWEEN = " \ue000 "
"""A word of no text: phrases do not reach from one text into the next."""
_CACHE_KB = 1024


class Document(NamedTuple):
    """Texts of a trajectory: all, or those of some of its steps."""

    run_id: str
    trajectory_key: str
    texts: Iterable[str]


class Segment:
    """An index of documents. Thread-safe."""

    def __init__(self, documents: Iterable[Document]) -> None:
        # Empty name: a temporary database. The tokenizer folds ASCII, and splits at nothing else.
        self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        runs, keys = list[str](), list[str]()
        try:
            self._db.execute(f"PRAGMA cache_size = -{_CACHE_KB}")
            self._db.execute("PRAGMA journal_mode = OFF")
            self._db.execute(
                "CREATE VIRTUAL TABLE words USING fts5("
                "text, content = '', columnsize = 0, tokenize = 'ascii')"
            )
            self._db.execute("BEGIN")
            for number, (run_id, key, texts) in enumerate(documents):
                text = _BETWEEN.join(map(plain, texts))
                self._db.execute("INSERT INTO words (rowid, text) VALUES (?, ?)", (number, text))
                runs.append(run_id)
                keys.append(key)
            self._db.execute("COMMIT")
            self._db.execute("INSERT INTO words (words) VALUES ('optimize')")
        except BaseException:
            self.close()
            raise
        self._places = pa.table([runs, keys], schema=FOUND)

    def find(self, term: Term) -> pa.Table:
        """Return run and key of the documents with a term; a trajectory may come several times."""
        match = f'"{" ".join(term.words)}"' + "*" * term.is_prefix
        (numbers,) = self._db.execute(
            "SELECT group_concat(rowid) FROM words WHERE words MATCH ?", (match,)
        ).fetchone()
        if numbers is None:
            return FOUND.empty_table()
        return self._places.take(np.fromstring(numbers, dtype=np.int64, sep=","))

    def close(self) -> None:
        """Delete the index."""
        self._db.close()
