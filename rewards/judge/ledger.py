"""The cache and the spending of judges, in one SQLite file that all processes of a machine share.

A restart keeps both, so a job that restarts pays for no reply twice and gets no new budget.
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson

_TABLES = """
create table if not exists replies (key text primary key, reply blob not null);
create table if not exists spending (
  judge text, run text, minute integer, calls integer, tokens integer,
  primary key (judge, run, minute)
);
"""
_BUSY_S = 10.0

Row = tuple[str, str, int]
"""Key of a row of spending: judge, run and minute."""


class OverBudget(Exception):
    """The judge has spent its budget; the message says which."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The most that one judge may spend.

    calls, tokens: None: no limit. window_s: In any time of this length; None: in one run.
    """

    calls: int | None
    tokens: int | None
    window_s: float | None


class Ledger:
    """The replies that a judge has had, and what it has spent."""

    def __init__(self, path: Path, judge: str, budget: Budget, replies_max: int) -> None:
        """Open or create the file.

        Args:
            path: The file.
            judge: Whose spending this is, with all of the same name and window.
            budget: Of this judge.
            replies_max: Of all judges; the oldest replies are dropped.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
        self._db.execute("pragma journal_mode = wal")
        self._db.execute("pragma synchronous = normal")
        self._db.executescript(_TABLES)
        self._judge = f"{judge} {budget.window_s}"
        self._budget, self._replies_max = budget, replies_max

    def reply(self, request: bytes) -> bytes | None:
        """Return the reply to an equal request."""
        found = self._db.execute("select reply from replies where key = ?", (_key(request),))
        row = found.fetchone()
        return row[0] if row is not None else None

    def keep(self, request: bytes, reply: bytes) -> None:
        """Keep a reply."""
        with self._transaction():
            self._db.execute("insert or replace into replies values (?, ?)", (_key(request), reply))
            oldest = "(select max(rowid) from replies) - ?"
            self._db.execute(f"delete from replies where rowid <= {oldest}", (self._replies_max,))

    def spend_call(self, run_id: str) -> Row:
        """Count one call; return its row, for `give_call_back`.

        Raises:
            OverBudget: The budget has no call or no token left; nothing is counted.
        """
        with self._transaction():
            calls, tokens = self._spent(run_id)
            for name, spent, limit in (
                ("calls", calls, self._budget.calls),
                ("tokens", tokens, self._budget.tokens),
            ):
                if limit is not None and spent >= limit:
                    window = self._budget.window_s
                    where = f"run {run_id}" if window is None else f"{window:g} s"
                    raise OverBudget(f"over budget: {spent} of {limit} {name} in {where}")
            row = self._row(run_id, 0)
            self._count(row, 1, 0)
            return row

    def give_call_back(self, row: Row) -> None:
        """Take back a call that the endpoint has not begun. row: what `spend_call` returned."""
        with self._transaction():
            self._db.execute(
                "update spending set calls = calls - 1 where judge = ? and run = ? and minute = ?",
                row,
            )

    def spend_tokens(self, run_id: str, tokens: int) -> None:
        """Count the tokens of a reply; they are known when it is there."""
        with self._transaction():
            self._count(self._row(run_id, 0), 0, tokens)

    def _row(self, run_id: str, age_s: float) -> Row:
        """Return the row of a time: one of each minute for a window, else one of each run."""
        if self._budget.window_s is None:
            return self._judge, run_id, 0
        return self._judge, "", int((time.time() - age_s) // 60)

    def _spent(self, run_id: str) -> tuple[int, int]:
        row = self._db.execute(
            "select coalesce(sum(calls), 0), coalesce(sum(tokens), 0) from spending "
            "where judge = ? and run = ? and minute >= ?",
            self._row(run_id, self._budget.window_s or 0),
        ).fetchone()
        return int(row[0]), int(row[1])

    def _count(self, row: Row, calls: int, tokens: int) -> None:
        self._db.execute(
            "insert into spending values (?, ?, ?, ?, ?) on conflict do update "
            "set calls = calls + excluded.calls, tokens = tokens + excluded.tokens",
            (*row, calls, tokens),
        )
        oldest = row[2] - int((self._budget.window_s or 0) // 60) - 1
        self._db.execute(
            "delete from spending where judge = ? and run = ? and minute < ?", (*row[:2], oldest)
        )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Hold the write lock from the start: what is read decides what is written."""
        self._db.execute("begin immediate")
        with self._db:  # commits, or rolls back on an error
            yield


def _key(request: bytes) -> str:
    return hashlib.sha256(request).hexdigest()


def canonical(request: object) -> bytes:
    """Return a request as bytes that are equal for equal requests."""
    return orjson.dumps(request, option=orjson.OPT_SORT_KEYS)
