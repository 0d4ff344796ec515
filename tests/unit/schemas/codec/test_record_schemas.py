"""Test that the record classes give exactly the schema files."""

from __future__ import annotations

import dataclasses

import pytest

from clawstream.schemas.codec.record_schemas import avsc_of
from clawstream.schemas.codec.single_object import AVRO_DIR, TOP_LEVEL


def test_the_schema_files_are_current() -> None:
    """Run `python -m clawstream.schemas.codec.record_schemas` after a change of a record."""
    derived = {f"{record.__name__}.avsc": avsc_of(record) for record in TOP_LEVEL}
    assert {path.name: path.read_text() for path in AVRO_DIR.glob("*.avsc")} == derived


@dataclasses.dataclass
class Undocumented:
    size: int


def test_a_field_without_a_doc_is_refused() -> None:
    with pytest.raises(ValueError, match="size has no doc"):
        avsc_of(Undocumented)
