"""The commands of `clawstream keys`; they return text for the terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime

from gateway.auth.api_keys import SCOPES, Scope, create_key, read_keys, revoke_key
from gateway.errors import GatewayError, Unprocessable
from schemas.settings import Settings

__all__ = ["GatewayError", "create", "listing", "revoke"]
DAY_S = 86400.0


def create(
    settings: Settings,
    name: str,
    scopes: Sequence[str],
    run_id: str | None,
    days: float | None,
    calls_per_minute: int | None = None,
    calls_at_once: int | None = None,
    tokens_per_day: int | None = None,
) -> str:
    """Create a key and return it. Raises GatewayError.

    Args:
        settings: They name the file of the keys.
        name: Unique name of the key.
        scopes: See `SCOPES`.
        run_id: The run of all records of the key; None: not fixed.
        days: Time until the key expires; None: never.
        calls_per_minute: None: no limit.
        calls_at_once: Concurrent calls; None: no limit.
        tokens_per_day: Tokens of prompts and replies per day (UTC); None: no limit.
    """
    if days is not None and not 0 < days <= 36500:
        raise Unprocessable(f"days: {days:g} is not in (0, 36500]", "days")
    expires_at = int(time.time() + days * DAY_S) if days is not None else None
    return create_key(
        settings.api_keys_file,
        name,
        [_scope(s) for s in scopes],
        run_id,
        expires_at,
        calls_per_minute,
        calls_at_once,
        tokens_per_day,
    )


def _scope(text: str) -> Scope:
    for scope in SCOPES:
        if scope == text:
            return scope
    raise Unprocessable(f"scope: {text[:40]!r} is none of {', '.join(SCOPES)}", "scope")


def listing(settings: Settings) -> str:
    """List all keys, one per line. Raises GatewayError."""
    keys = read_keys(settings.api_keys_file)
    if not keys:
        return f"no API keys in {settings.api_keys_file}"
    rows: list[tuple[str, ...]] = [
        ("NAME", "ID", "SCOPES", "RUN", "CREATED", "EXPIRES", "CALLS/MIN", "AT ONCE", "TOKENS/DAY")
    ]
    rows += [
        (
            k.name,
            k.key_id,
            ",".join(k.scopes),
            k.run_id or "-",
            _day(k.created_at),
            _day(k.expires_at),
            *(
                str(limit or "-")
                for limit in (k.calls_per_minute, k.calls_at_once, k.tokens_per_day)
            ),
        )
        for k in keys
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _day(seconds: int | None) -> str:
    if seconds is None:
        return "-"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")


def revoke(settings: Settings, name: str) -> str:
    """Remove a key, given by its name or id. Raises GatewayError."""
    gone = revoke_key(settings.api_keys_file, name)
    return f"revoked {gone.name} ({gone.key_id})"
