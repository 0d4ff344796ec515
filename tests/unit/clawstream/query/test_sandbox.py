"""Limits of a query.

A query cannot access files, the network, settings or Python. Its memory and time are bounded, also
when the client stops reading the answer.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import duckdb
import psutil
import pyarrow as pa
import pytest
from support.small_lake import SmallLake

from clawstream.query.connection import connect
from clawstream.query.sandbox import QueryResult, answer, run_sql
from clawstream.query.sandbox_launch import QueryProcess, query_process
from clawstream.schemas.settings import LakeSettings, Settings
from clawstream.stream_jobs.errors import SqlError

ROOT = Path(__file__).parents[4]
ESCAPES = (
    "FROM read_csv('.tmp/probe.csv')", "FROM '.tmp/probe.csv'", "FROM read_text('.tmp/probe.csv')",
    "FROM read_blob('.tmp/*')", "FROM read_json('.tmp/probe.csv')",
    "FROM read_parquet('.tmp/probe.csv')", "FROM sniff_csv('.tmp/probe.csv')",
    "FROM parquet_metadata('.tmp/probe.csv')", "FROM glob('.tmp/*')", "FROM glob('/etc/*')",
    "FROM read_text('/etc/hosts')", "DESCRIBE '.tmp/probe.csv'", "SUMMARIZE '.tmp/probe.csv'",
    "CREATE TEMP TABLE x AS FROM '.tmp/probe.csv'", "COPY steps TO '.tmp/out.csv'",
    "COPY steps TO '/tmp/out.csv'", "COPY (SELECT 1) TO '.tmp/out.parquet' (FORMAT parquet)",
    "CREATE TEMP TABLE y(a INT); COPY y FROM '.tmp/probe.csv'", "ATTACH '.tmp/x.db' AS x",
    "ATTACH '.tmp/there.db' AS x", "ATTACH 'http://127.0.0.1:9/x.db' AS x",
    "EXPORT DATABASE '.tmp/export'", "IMPORT DATABASE '.tmp/export'",
    "INSTALL httpfs", "INSTALL httpfs FROM 'http://127.0.0.1:9'",
    "FORCE INSTALL httpfs FROM '.tmp'", "LOAD httpfs", "LOAD '.tmp/x.duckdb_extension'",
    "UPDATE EXTENSIONS", "SET memory_limit = '100GB'", "SET GLOBAL threads = 64",
    "SET temp_directory = '.tmp'", "RESET temp_directory", "SET enable_external_access = true",
    "SET lock_configuration = false", "SET allowed_directories = ['/']",
    "SET file_search_path = '/'", "SET python_enable_replacements = true",
    "SET profiling_output = '.tmp/profile'", "PRAGMA enable_profiling = 'json'",
    "PRAGMA memory_limit = '100GB'", "SET home_directory = '/'", "SET log_query_path = '.tmp/log'",
    "CALL enable_logging(storage = 'file', storage_path = '.tmp')",
    "CALL enable_logging(storage = 'file', storage_config = {'path': '.tmp'})",
    "CREATE PERSISTENT SECRET s (TYPE http)", "FROM read_csv('http://127.0.0.1:9/x.csv')",
    "FROM 'https://127.0.0.1:9/x.parquet'", "FROM read_csv('s3://bucket/x.csv')",
    "FROM read_ndjson_objects('/etc/hosts')", "FROM read_duckdb('/etc/hosts')",
    "FROM query('FROM read_text(''/etc/hosts'')')", "FROM delta_scan('/tmp')", "LOAD delta",
    "PREPARE p AS FROM read_text($1); EXECUTE p('/etc/hosts')",
    "SET VARIABLE f = '/etc/hosts'; FROM read_text(getvariable('f'))",
    "FROM json_execute_serialized_sql(json_serialize_sql('FROM read_text(''/etc/hosts'')'))",
    "CREATE VIEW v AS FROM read_text('/etc/hosts'); FROM v",
    "CREATE MACRO m(f) AS TABLE FROM read_text(f); FROM m('/etc/hosts')",
    "COPY (SELECT 1) TO '/dev/stdout'", "CREATE TEMP TABLE z(a VARCHAR); COPY z FROM '/dev/stdin'",
    "PRAGMA import_database('.tmp')", "PRAGMA disable_optimizer", "PRAGMA force_checkpoint",
    "PRAGMA temp_directory = '.tmp'", "FROM a_python_variable", "FROM A_MODULE_VARIABLE",
    "SELECT getenv('HOME')",
)  # fmt: skip
A_MODULE_VARIABLE = pa.table({"a": [1]})


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    settings = Settings(data_dir=tmp_path_factory.mktemp("lake"))
    SmallLake(settings)
    return settings


@pytest.fixture(scope="module", params=["without .tmp", "with .tmp"])
def connection(
    request: pytest.FixtureRequest, settings: Settings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """A connection whose working directory has, or lacks, DuckDB's temporary directory."""
    former, here = Path.cwd(), tmp_path_factory.mktemp("work")
    if request.param == "with .tmp":
        (here / ".tmp").mkdir()
        (here / ".tmp" / "probe.csv").write_text("a\n1\n")
        duckdb.connect(str(here / ".tmp" / "there.db")).close()
    before = sorted(p.relative_to(here) for p in here.rglob("*"))
    os.chdir(here)
    try:
        yield connect(settings)
        assert sorted(p.relative_to(here) for p in here.rglob("*")) == before, (
            "a query has written a file"
        )
    finally:
        os.chdir(former)


@pytest.mark.slow
@pytest.mark.parametrize("query", ESCAPES)
def test_a_query_can_not_leave(connection: Any, query: str) -> None:
    a_python_variable = pa.table({"a": [1]})
    with pytest.raises(duckdb.Error):
        connection.sql(query).fetchall()
    assert a_python_variable.num_rows == 1


def query_processes(before: frozenset[psutil.Process] = frozenset()) -> set[psutil.Process]:
    """Return the children of this process that are not in `before`, such as a broker's JVM."""
    return set(psutil.Process().children()) - before


@pytest.mark.slow
def test_memory_is_bounded_by_the_operating_system(settings: Settings) -> None:
    """DuckDB does not count the memory of this function and ignores interrupts during it."""
    small = settings.model_copy(update={"lake": LakeSettings(sql_memory_mb=512)})
    for query in (
        "SELECT length(repeat('x', 3000000000))",
        "SELECT list(range) FROM range(1000000000)",
    ):
        with pytest.raises(SqlError, match=r"the query needs more than lake\.sql_memory_mb=512"):
            run_sql(small, query)
    assert run_sql(small, "SELECT length(repeat('x', 1000000)) AS n", "csv") == "n\n1000000"


@pytest.mark.slow
def test_time_is_bounded_and_the_process_is_gone(settings: Settings) -> None:
    short = settings.model_copy(update={"lake": LakeSettings(sql_timeout_s=1)})
    before = frozenset(query_processes())
    with pytest.raises(SqlError, match=r"the query took longer than lake\.sql_timeout_s=1: "):
        run_sql(
            short,
            "SELECT count(*) FROM range(100000000000) t(a), range(1000) u(b) WHERE a * b % 7 = 3",
        )
    assert not query_processes(before)


@pytest.mark.slow
def test_an_answer_without_end_is_read_as_far_as_one_likes(settings: Settings) -> None:
    before = frozenset(query_processes())
    with answer(settings, "SELECT range AS a FROM range(1000000000000)") as reader:
        (process,) = query_processes(before)
        batches = list(islice(reader, 3))
        assert process.is_running()
    assert [v.as_py() for v in batches[2].column(0)[:2]] == [2048, 2049]
    assert not process.is_running()


@pytest.mark.slow
def test_an_error_in_the_middle_of_an_answer_is_told(settings: Settings) -> None:
    out: list[pa.RecordBatch] = []
    with pytest.raises(SqlError, match="in the middle"):
        with answer(
            settings,
            "SELECT CASE WHEN a < 90000 THEN a ELSE error('in the middle') END AS a FROM "
            "range(100000) t(a)",
        ) as reader:
            out.extend(reader)
    assert sum(b.num_rows for b in out) < 100_000


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_with_who_asked_the_process_ends(settings: Settings, number: signal.Signals) -> None:
    query = "SELECT range AS a FROM range(1000000000000)"
    command = [
        sys.executable,
        "-m",
        "clawstream",
        "sql",
        query,
        f"data_dir={settings.data_dir}",
        "-f",
        "csv",
    ]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"a\n"
        (child,) = psutil.Process(process.pid).children()
        process.send_signal(number)
        said = process.communicate(timeout=60)[1].decode()
    assert "Traceback" not in said and process.returncode != 0
    psutil.wait_procs([child], timeout=60)
    assert not child.is_running()


@pytest.mark.slow
def test_a_process_can_be_started_before_it_is_asked(settings: Settings) -> None:
    with query_process() as worker, answer(settings, "SELECT 1 AS a", worker=worker) as reader:
        assert [batch.to_pydict() for batch in reader] == [{"a": [1]}]
    assert worker.process.returncode is not None


@pytest.mark.slow
def test_a_process_that_is_never_asked_ends_without_a_word() -> None:
    """The parent process was killed before it had a query."""
    with query_process() as worker:
        said, _ = worker.process.communicate(timeout=60)  # closes its standard input
        assert (worker.process.returncode, said, worker.errors.read()) == (0, b"", b"")


@pytest.mark.slow
def test_a_wrong_setting_ends_the_process(settings: Settings) -> None:
    command = [sys.executable, "-m", "clawstream", "sql", "SELECT 1", "lake.sql_memory_mb=lots"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "lake.sql_memory_mb" in line


@pytest.mark.slow
def test_a_statement_without_a_result_and_a_missing_lake(
    settings: Settings, tmp_path: Path
) -> None:
    assert run_sql(settings, "CREATE TEMP TABLE x (a INT)", "json") == "[]"
    with pytest.raises(SqlError, match="no lake at /"):
        run_sql(Settings(data_dir=tmp_path), "SELECT 1")


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        ("import os; os._exit(3)", "ended with code 3: standard error says why"),
        ("import os; os.kill(os.getpid(), 9)", r"ended with SIGKILL: the query needs more than"),
    ],
)
def test_only_a_process_that_was_killed_is_said_to_need_memory(ends: str, says: str) -> None:
    with subprocess.Popen([sys.executable, "-c", ends], stdout=subprocess.PIPE) as process:
        worker = QueryProcess(process, io.BytesIO())
        with pytest.raises(SqlError, match=says):
            QueryResult(worker, LakeSettings())


def test_what_the_process_met_is_passed_on() -> None:
    wrong = {"GOOGLE_SERVICE_ACCOUNT_KEY": "no JSON"}
    lake = LakeSettings(uri="gs://bucket", storage_options=wrong)
    with pytest.raises(SqlError, match=r"store of gs://bucket/\w+ is away: .* service account"):
        run_sql(Settings(lake=lake), "select 1")
