"""Which keys a table has, whatever their age: for records that come again long after the window of the newest ids has forgotten them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pyarrow.compute as pc

Key = tuple[Any, ...]


def existing_keys(rows: Any, names: Sequence[str], keys: Collection[Key]) -> set[Key]:
    """Those of the keys that are there. rows: a pyarrow dataset; only files whose statistics allow one of the keys are read."""
    condition = None
    for at, name in enumerate(names):
        one = pc.field(name).isin(list({key[at] for key in keys}))
        condition = one if condition is None else condition & one
    found = rows.to_table(columns=list(names), filter=condition)
    return set(zip(*(found.column(name).to_pylist() for name in names), strict=True)) & set(keys)
