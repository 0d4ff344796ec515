"""The Delta Lake writer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, model_validator

from clawstream.schemas.settings.base import Count, Positive, Secret, Section


class LakeSettings(Section):
    """The Delta Lake writer."""

    uri: str | None = Field(
        None, description="another disk or an object store; default <data_dir>/lake"
    )
    storage_options: Annotated[Mapping[str, str], Secret("options")] = Field(
        {}, description="credentials and options of the object store"
    )
    flush_interval_s: Positive = Field(2.0, description="fresher tables against more small files")
    flush_rows: Count = Field(8000, description="memory against more commits")
    dedupe_window: Count = Field(
        200_000, description="ids a table remembers to drop re-sent records"
    )
    care_interval_s: Positive = Field(
        600.0,
        description="interval of maintenance: merge small files, delete expired rows and files",
    )
    history_days: Positive = Field(
        2.0,
        description="how far back SQL can read former versions; files and log entries are kept "
        "as long",
    )
    retention_days: Mapping[str, Annotated[float, Field(ge=1)]] = Field(
        {}, description="table to the age at which its rows are deleted; default: never"
    )
    sql_memory_mb: Annotated[int, Field(ge=64)] = Field(
        4096, description="memory limit of one SQL query"
    )
    sql_timeout_s: Positive = Field(300.0, description="time limit of one SQL query")
    writers: Annotated[int, Field(ge=1, le=999)] = Field(
        1, description="number of writer processes; each takes the partitions p % writers == writer"
    )
    writer: Annotated[int, Field(ge=0)] = Field(0, description="number of this writer, from 0")

    @model_validator(mode="after")
    def _consistent(self) -> LakeSettings:
        if self.writer >= self.writers:
            raise ValueError(
                f"writer {self.writer} is not one of writers {self.writers}, which count from 0"
            )
        return self
