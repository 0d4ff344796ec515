"""The payload of candidates: its place on `claw.trajectories`."""

from __future__ import annotations

from collections.abc import Mapping

from schemas.records import Place

_PLACE = ("topic_id", "partition", "first_offset", "last_offset")


def payload_place(headers: Mapping[str, bytes]) -> Place | None:
    """Return the place of a candidate's payload from its headers; None when it has no payload.

    Raises:
        ValueError: The headers are not four complete values.
    """
    if not any(name in headers for name in _PLACE):
        return None
    try:
        topic_id, partition, first, last = (headers[name].decode("ascii") for name in _PLACE)
        return Place(
            topic_id=topic_id,
            partition=int(partition),
            first_offset=int(first),
            last_offset=int(last),
        )
    except (KeyError, ValueError) as e:
        raise ValueError(f"headers {', '.join(_PLACE)}: {e!r} in {dict(headers)}"[:500]) from e
