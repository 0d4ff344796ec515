"""The memory limit of a query, as its error message names it."""

from __future__ import annotations

from clawstream.schemas.settings import LakeSettings


def too_large(lake: LakeSettings) -> str:
    """Return the error message of a query that needs more memory than its limit."""
    return (
        f"the query needs more than lake.sql_memory_mb={lake.sql_memory_mb}: "
        "narrow it, or raise the limit"
    )
