"""How many bytes of requests are held at once: a bound for all calls together."""

from __future__ import annotations

from gateway.errors import Overloaded


class Memory:
    """Counts what is held. limit: bytes, see gateway.max_in_flight_bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.held = 0

    def take(self, size: int) -> None:
        """Hold `size` bytes more. Raises Overloaded when they would be too many; then nothing is taken."""
        if self.held + size > self._limit:
            raise Overloaded(
                f"the calls in flight hold {self.held} bytes, {size} more exceed gateway.max_in_flight_bytes={self._limit}"
            )
        self.held += size

    def give_back(self, size: int) -> None:
        """They are held no more."""
        self.held -= size
