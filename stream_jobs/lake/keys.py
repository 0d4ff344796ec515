"""Look up keys of any age, for records redelivered after the dedupe window evicted them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pyarrow.compute as pc

KeyValues = tuple[Any, ...]


def existing_keys(rows: Any, names: Sequence[str], keys: Collection[KeyValues]) -> set[KeyValues]:
    """Return the keys that the rows contain.

    Args:
        rows: a pyarrow dataset; files whose statistics exclude all keys are not read.
        names: the key columns.
    """
    condition = None
    for at, name in enumerate(names):
        one = pc.field(name).isin(list({key[at] for key in keys}))
        condition = one if condition is None else condition & one
    found = rows.to_table(columns=list(names), filter=condition)
    return set(zip(*(found.column(name).to_pylist() for name in names), strict=True)) & set(keys)
