"""Environment variables of processes that run what the model decides: without secrets."""

from __future__ import annotations

import os
from collections.abc import Container

_SECRET = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")


def child_environment(keep: Container[str] = ()) -> dict[str, str]:
    """Return this process's variables without secrets and without Clawstream's settings.

    Args:
        keep: names of variables that are passed on although they look like a secret.
    """
    return {name: value for name, value in os.environ.items() if name in keep or not _secret(name)}


def _secret(name: str) -> bool:
    return name.startswith("CLAWSTREAM_") or name.upper().endswith(_SECRET)
