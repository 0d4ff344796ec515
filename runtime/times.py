"""Moments as a person writes them. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

HOW = (
    "a time like 2026-11-22T08:00 (UTC), milliseconds since the epoch, or how long ago: 30m, 2h, 7d"
)
_EPOCH = datetime.fromtimestamp(0, UTC)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def parse_instant(text: str, now: datetime) -> datetime:
    """Parse an instant: ISO 8601 (default UTC), ms since the epoch, or an age as `30m`, `2h`, `7d`.

    Returns:
        A time in UTC, from 1970 to the year 9999.

    Raises:
        ValueError: The message describes the accepted formats.
    """
    try:
        if text.isdecimal():
            at = _EPOCH + timedelta(milliseconds=int(text))
        elif back := re.fullmatch(r"(\d+)([smhd])", text):
            at = now - timedelta(**{_UNITS[back[2]]: int(back[1])})
        else:
            at = datetime.fromisoformat(text)
            at = (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError) as e:
        raise ValueError(f"{text[:80]!r} is no moment: write {HOW}") from e
    if at < _EPOCH:
        raise ValueError(f"{text[:80]!r} is before 1970: write {HOW}")
    return at


def millis(at: datetime) -> int:
    """Whole milliseconds since the epoch, rounded down."""
    return (at - _EPOCH) // timedelta(milliseconds=1)
