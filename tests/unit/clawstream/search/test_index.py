"""The index against a plain scan of a table whose files are added, merged and erased."""

from __future__ import annotations

import json
import resource
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count as counted
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clawstream.search import index
from clawstream.search.index import TextIndex
from clawstream.search.texts import texts_of
from clawstream.search.words import Term, terms_of, words_of
from clawstream.stream_jobs.errors import SqlError


class Call(NamedTuple):
    run_id: str
    trajectory_key: str
    request_json: str | None
    response_json: str | None


def call(key: str, *asked: str, reply: str = "", run: str = "run") -> Call:
    messages = [{"role": "user", "content": text} for text in asked]
    return Call(run, key, json.dumps({"messages": messages}), json.dumps({"content": reply}))


class Table:
    """Parquet files in a directory, and the index that follows them."""

    def __init__(self, directory: Path) -> None:
        self.index, self.files = TextIndex(60.0), dict[str, list[Call]]()
        self._directory, self._names = directory, counted()

    def write(self, *calls: Call) -> str:
        name = str(self._directory / f"{next(self._names)}.parquet")
        columns = [list(column) for column in zip(*calls, strict=True)] or [[]] * 4
        arrays = [pa.array(column, pa.string()) for column in columns]
        pq.write_table(pa.table(arrays, names=Call._fields), name)
        self.files[name] = list(calls)
        return name

    def rewrite(self, names: Sequence[str], erased: str | None = None) -> None:
        """Write the rows of files as one new file, without those of a key."""
        rows = [row for name in names for row in self.files.pop(name)]
        self.write(*(row for row in rows if row.trajectory_key != erased))

    def follow(self, count: int | None = None) -> None:
        """Let the index follow the first files, or all."""
        names = list(self.files)[:count]
        fragments = {f.path: f for name in names for f in ds.dataset(name).get_fragments()}
        self.index.follow(fragments)

    def found(self, search: str) -> set[tuple[str, str]]:
        """Return the trajectories that have all terms, by the index."""
        tables, _ = self.index.find(search)
        return set.intersection(*({tuple(row.values()) for row in t.to_pylist()} for t in tables))

    def scanned(self, search: str) -> set[tuple[str, str]]:
        """Return the same by reading all files."""
        texts: dict[tuple[str, str], list[list[str]]] = {}
        for row in (row for rows in self.files.values() for row in rows):
            known = texts.setdefault((row.run_id, row.trajectory_key), [])
            known.extend(map(words_of, texts_of(row.request_json, row.response_json)))
        terms = terms_of(search)
        return {
            place for place, found in texts.items()
            if terms and all(any(has(words, term) for words in found) for term in terms)
        }  # fmt: skip


def has(words: Sequence[str], term: Term) -> bool:
    *first, last = term.words
    for at in range(len(words) - len(first)):
        here = words[at + len(first)]
        if words[at : at + len(first)] == first and (
            here.startswith(last) if term.is_prefix else here == last
        ):
            return True
    return False


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    made = Table(tmp_path)
    yield made
    made.index.stop()


TEXTS = st.lists(
    st.sampled_from(
        ["go", "Gone", "a", "b-c", "né", "ne", "数据", "数", "ß", "AND", "NEAR(", '"', "*", "\0",
         "\ud800", "\ue000", "{", '{"go": ["a"]}', "^", "col:", "🙂"]
    ) | st.text(max_size=3),
    max_size=5,
).map(" ".join)  # fmt: skip
CALLS = st.builds(
    call, st.sampled_from(["k", "l", "m"]), TEXTS, TEXTS, reply=TEXTS, run=st.sampled_from("rs")
)
ACTIONS = st.one_of(
    st.tuples(st.just("write"), st.lists(CALLS, max_size=4)),
    st.tuples(st.just("merge"), st.integers(1, 4)),
    st.tuples(st.just("erase"), st.sampled_from(["k", "l", "m"])),
    st.tuples(st.just("catch up"), st.none()),
)


@pytest.mark.slow
@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(actions=st.lists(ACTIONS, max_size=8), searches=st.lists(TEXTS, min_size=1, max_size=6))
def test_finds_what_a_scan_finds_whatever_became_of_the_files(
    tmp_path: Path, actions: list[tuple[str, Any]], searches: list[str]
) -> None:
    table = Table(tmp_path)
    for action, value in actions:
        match action:
            case "write":
                table.write(*value)
            case "merge":
                table.rewrite(list(table.files)[:value])
            case "erase":
                for name in list(table.files):
                    table.rewrite([name], erased=value)
            case "catch up":
                table.follow()
                table.index.catch_up()
    table.follow()
    table.index.catch_up()
    for search in searches:
        assert table.found(search) == table.scanned(search), search
    assert table.index.find("a")[1] == 1.0
    table.index.stop()


@pytest.mark.parametrize(
    "search",
    ['"', '""', "*", "a*", "go AND", "AND", "NOT NOT", "NEAR(", "NEAR(a b, 2)", "text:go", "^go",
     "-go", "go)", "'; DROP TABLE words --", "\0", "\ud800", "a OR b", "{x}", "%", "\\",
     "a" * 60_000, "(" * 5000, '"' + "a " * 20_000],
)  # fmt: skip
def test_a_hostile_search_is_a_plain_one(table: Table, search: str) -> None:
    table.write(call("k", "go AND or not near text x drop table words a b"), call("l", "other"))
    table.follow()
    table.index.catch_up()
    assert table.found(search) == table.scanned(search)


def test_a_search_that_takes_too_long_says_its_own_limit() -> None:
    with pytest.raises(SqlError, match=r"^the search took longer than -1 s: search for fewer"):
        TextIndex(-1.0).find("word")


def test_says_what_share_of_the_rows_it_has(table: Table) -> None:
    assert table.index.find("one") == ([index.FOUND.empty_table()], 1.0)
    table.write(call("k", "one"))
    table.follow()
    assert table.index.find("one")[1] == 0.0
    table.index.catch_up()
    table.write(call("l", "two"), call("m", "three"), call("n", "four"))
    table.follow()
    assert table.index.find("one")[1] == 0.25 and table.found("one") == {("run", "k")}
    table.index.catch_up()
    assert table.index.find("one")[1] == 1.0 and table.found("two") == {("run", "l")}
    table.rewrite(list(table.files))
    table.follow()
    assert table.index.find("one")[1] == 1.0 and table.found("one two") == set()
    assert table.found("two") == {("run", "l")}, "the old files answer until the new one is read"


def test_words_of_several_calls_count_together_and_phrases_stay_in_one_text(table: Table) -> None:
    table.write(call("k", "red", "green tea"), call("l", "red"))
    table.write(call("k", reply="blue"))
    table.follow()
    table.index.catch_up()
    assert table.found("blue red") == {("run", "k")}
    assert table.found('"green tea"') == {("run", "k")}
    assert table.found('"red green"') == set()


def test_an_erased_text_is_in_no_segment_afterwards(table: Table) -> None:
    table.write(call("k", "secret"), call("l", "plain"))
    table.follow()
    table.index.catch_up()
    table.rewrite(list(table.files), erased="k")
    table.follow()
    table.index.catch_up()
    (segment,) = (part.segment for part in table.index._parts)
    (terms,) = segment._db.execute(
        "SELECT group_concat(CAST(block AS TEXT)) FROM words_data"
    ).fetchone()
    assert "plain" in terms and "secret" not in terms
    assert table.found("secret") == set()


def test_a_damaged_file_is_left_out_said_and_tried_again(table: Table) -> None:
    table.write(call("k", "one"))
    bad = table.write(call("l", "two"))
    away = Path(bad).read_bytes()
    table.follow()
    Path(bad).write_bytes(away[:4] + b"\xff" * (len(away) - 200) + away[-196:])
    table.index.catch_up()
    assert table.found("one") == {("run", "k")} and table.index.find("one")[1] == 0.5
    Path(bad).write_bytes(away)
    table.follow()
    table.index.catch_up()
    assert table.found("two") == {("run", "l")} and table.index.find("one")[1] == 1.0


@contextmanager
def full_disk() -> Iterator[None]:
    """Let files grow to 64 KB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_a_full_disk_is_said_and_what_is_indexed_answers(table: Table) -> None:
    for number in range(16):  # together too large for memory
        table.write(call(f"k{number}", " ".join(f"{number}x{i:x}" for i in range(8000))))
    for number in range(16):
        table.follow(number + 1)
        with full_disk():  # the merge of 16 segments fails
            table.index.catch_up()
    assert table.index.find("")[1] == 1.0 and len(table.index._parts) == 16
    large = call("large", " ".join(f"y{i:x}" for i in range(100_000)))
    table.write(*[large] * 16)
    table.follow()
    with full_disk():
        table.index.catch_up()
    assert table.index.find("")[1] == 0.5
    assert table.found("15x1") == {("run", "k15")} and table.found("y7") == set()
    table.follow()
    table.index.catch_up()
    assert table.found("15x1") == {("run", "k15")} and table.found("y7") == {("run", "large")}
    assert table.index.find("")[1] == 1.0 and len(table.index._parts) == 2


@pytest.mark.slow
def test_many_small_files_share_few_segments(table: Table) -> None:
    for number in range(70):
        table.write(call(f"k{number}", f"word{number}"))
        table.follow()
        table.index.catch_up()
    assert len(table.index._parts) < 2 * 16
    assert all(table.found(f"word{n}") >= {("run", f"k{n}")} for n in range(70))


def test_a_text_that_steps_repeat_is_in_one_document(table: Table) -> None:
    table.write(*(call("k", *["same text"] * n, f"new{n}") for n in range(9)))
    table.follow()
    table.index.catch_up()
    (part,) = table.index._parts
    assert len(part.segment._places) == 1


def test_the_thread_indexes_what_comes_also_while_nobody_asks(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "IDLE_S", 0.01)
    table.write(call("k", "one"))
    table.index.start(table.follow)
    while not table.found("one"):
        threading.Event().wait(0.001)
    table.index.stop()
    assert "text-index" not in [thread.name for thread in threading.enumerate()]
    assert table.found("one") == set()
