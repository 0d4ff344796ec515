"""How many calls are served at once, and how many bytes of requests they hold: bounds for all protocols together."""

from __future__ import annotations

from gateway.errors import Overloaded


class Memory:
    """Counts calls and what they hold. limit: bytes, see gateway.max_in_flight_bytes; max_calls: see gateway.max_in_flight."""

    def __init__(self, limit: int, max_calls: int) -> None:
        self._limit, self._max_calls = limit, max_calls
        self.held = self.calls = 0

    def begin(self) -> None:
        """A call begins. Raises Overloaded; then it does not."""
        if self.calls >= self._max_calls:
            raise Overloaded(f"{self.calls} calls are in flight, see gateway.max_in_flight")
        self.calls += 1

    def end(self) -> None:
        """A call has ended."""
        self.calls -= 1

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
