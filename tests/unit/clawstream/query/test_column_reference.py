"""The reference of the lake's columns is complete and up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawstream.query import column_reference
from clawstream.stream_jobs.lake.tables.catalog import catalog

PAGE = Path(__file__).parents[4] / "docs" / "lake-columns.md"


@pytest.mark.slow
def test_the_page_is_up_to_date() -> None:
    expected = column_reference.reference() + "\n"
    assert PAGE.read_text() == expected, (
        "python -m clawstream.query.column_reference > docs/lake-columns.md"
    )


@pytest.mark.slow
def test_each_column_has_a_description() -> None:
    tables, views = column_reference.of_tables(), column_reference.of_views()
    assert tables.keys() == catalog().keys()
    every = {**tables, **{f"view {name}": columns for name, columns in views.items()}}
    lacking = [
        f"{name}.{column.path}"
        for name, columns in every.items()
        for column in columns
        if not column.description
    ]
    assert lacking == []
    assert "steps[].step_id" in {column.path for column in tables["trajectories"]}
    assert "step_index" in {column.path for column in views["steps"]}
