"""Other readers of Delta tables see the rows and types that the lake writer wrote.

`make test-readers` installs the readers that `.venv` lacks; without them their tests are skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from support.small_lake import SmallLake

from clawstream.schemas import records
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import pack_ids, pack_logprobs
from clawstream.stream_jobs.lake.delta.maintenance import compact
from clawstream.stream_jobs.lake.delta.table import open_table

pytestmark = pytest.mark.slow
COMMITS = 25
"""More than the checkpoint interval, so that a reader needs both the checkpoint and the log."""
ROWS = [
    {
        "step_id": f"k~{i}.0",
        "prompt_token_ids": [1, 2, i],
        "response_logprobs": [-0.5, -0.25],
        "versions": [{"version": "r/1.0", "start": 0, "end": 2}],
        "temperature": 0.5 if i % 2 else None,
        "received_us": 1_000_000 + i,
    }
    for i in range(COMMITS)
]


def a_step(i: int) -> records.Step:
    return records.Step(
        step_id=f"k~{i}.0", run_id="r", trajectory_key="k", call_id=f"k~{i}", choice_index=0,
        protocol="openai.chat", model="m", status="ok", streamed=False, request_json=b"{}",
        response_json=b"{}", prompt_token_ids=pack_ids([1, 2, i]),
        response_token_ids=pack_ids([3, 4]), response_logprobs=pack_logprobs([-0.5, -0.25]),
        versions=(records.VersionSpan(version="r/1.0", start=0, end=2),), gateway_id="g",
        received_at=1_000_000 + i, finished_at=2_000_000 + i,
        sampling=records.Sampling(source="engine", temperature=0.5) if i % 2 else None,
    )  # fmt: skip


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the location of a table with a checkpoint, merged files and later commits."""
    settings = Settings(data_dir=tmp_path_factory.mktemp("lake"))
    lake = SmallLake(settings)
    for i in range(COMMITS):
        lake.put("steps", "SS", a_step(i))
        if i == COMMITS - 3:
            compact(open_table(settings.lake_uri, "steps", {}), "steps", {})
    where = f"{settings.lake_uri}/steps"
    assert list(Path(where, "_delta_log").glob("*.checkpoint.parquet"))
    return where


def rows_of(found: pa.Table) -> list[dict[str, Any]]:
    """Return the compared columns of the steps, ordered by their numbers."""
    columns = found.select(
        ["step_id", "prompt_token_ids", "response_logprobs", "versions", "sampling", "received_at"]
    )
    received = columns["received_at"].cast(pa.timestamp("us", "UTC")).cast(pa.int64())
    rows = [
        {
            "step_id": row["step_id"],
            "prompt_token_ids": row["prompt_token_ids"],
            "response_logprobs": row["response_logprobs"],
            "versions": row["versions"],
            "temperature": (row["sampling"] or {}).get("temperature"),
            "received_us": at,
        }
        for row, at in zip(columns.to_pylist(), received.to_pylist(), strict=True)
    ]
    return sorted(rows, key=lambda row: row["received_us"])


def test_deltalake(table: str) -> None:
    found = QueryBuilder().register("steps", DeltaTable(table)).execute("SELECT * FROM steps")
    assert rows_of(pa.table(found)) == ROWS


def test_pandas(table: str) -> None:
    pd = pytest.importorskip("pandas")
    found = DeltaTable(table).to_pandas()
    assert isinstance(found, pd.DataFrame)
    assert found["received_at"].dt.tz is not None
    assert rows_of(pa.Table.from_pandas(found, preserve_index=False)) == ROWS


def test_polars(table: str) -> None:
    pl = pytest.importorskip("polars")
    found = pl.scan_delta(table).filter(pl.col("run_id") == "r").collect()
    assert rows_of(found.to_arrow()) == ROWS
    as_of = pl.scan_delta(table, version=3).select(pl.len()).collect()
    assert as_of.item() == 2  # versions 0 and 1: the table and the writer's lease


def test_duckdb_delta_extension(table: str) -> None:
    extension = pytest.importorskip("duckdb_extension_delta")
    import duckdb

    connection = duckdb.connect()
    (file,) = Path(extension.__file__).parent.glob(
        f"extensions/v{duckdb.__version__}/delta.duckdb_extension"
    )
    connection.execute(f"LOAD '{file}'")
    connection.execute("SET TimeZone = 'UTC'")
    found = connection.sql(f"FROM delta_scan('{table}')").to_arrow_table()
    assert rows_of(found) == ROWS
