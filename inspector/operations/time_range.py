"""The time that the charts of the operations page show. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

from clawstream.inspector.errors import InvalidAddress

RANGES = {
    "15m": (900, 15),
    "1h": (3_600, 60),
    "6h": (21_600, 300),
    "24h": (86_400, 1_200),
    "7d": (604_800, 7_200),
    "30d": (2_592_000, 43_200),
}
"""Name of a range to its length and the length of a bucket, in seconds."""
DEFAULT = "1h"
ALIGN_S = 10
"""A range that ends now ends at a multiple of this: pages that look at once ask the same."""


class TimeRange(NamedTuple):
    """Times from `from_s` to before `to_s`, in seconds since the epoch.

    is_live: It ends now. bucket_s: What counts over time are counted in.
    """

    name: str
    from_s: int
    to_s: int
    bucket_s: int
    is_live: bool

    def moved(self, by: int) -> str:
        """Return the end of the range that is `by` lengths later, as in an address."""
        return _text(self.to_s + by * (self.to_s - self.from_s))

    @property
    def texts(self) -> tuple[str, str]:
        """Beginning and end, for a person."""
        first, last = (_text(at).replace("T", " ").removesuffix(":00") for at in self[1:3])
        return first, last.removeprefix(first[:11])

    @property
    def until(self) -> str:
        """The end, as in an address."""
        return _text(self.to_s)


def time_range(name: str, until: str, now_s: float) -> TimeRange:
    """Return the range of an address.

    Args:
        name: Of `RANGES`; "": `DEFAULT`.
        until: End in ISO 8601, in UTC unless it says otherwise; "": now.
        now_s: Seconds since the epoch.

    Raises:
        InvalidAddress: There is no such range, or no such time.
    """
    name = name or DEFAULT
    if name not in RANGES:
        raise InvalidAddress(f"range: {name[:40]!r} is none of {', '.join(RANGES)}")
    length_s, bucket_s = RANGES[name]
    end_s = _end_s(until)
    to_s = (int(now_s) // ALIGN_S + 1) * ALIGN_S if end_s is None else end_s
    return TimeRange(name, to_s - length_s, to_s, bucket_s, end_s is None)


def _end_s(until: str) -> int | None:
    if not until:
        return None
    try:
        moment = datetime.fromisoformat(until)
        end_s = int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
        if not 0 <= end_s < 1 << 33:
            raise ValueError
    except (ValueError, OverflowError):
        raise InvalidAddress(f"until: {until[:40]!r} is no time in ISO 8601") from None
    return end_s


def _text(time_s: int) -> str:
    return datetime.fromtimestamp(max(0, time_s), UTC).strftime("%Y-%m-%dT%H:%M:%S")
