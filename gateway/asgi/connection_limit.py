"""Limits the connections of clients: a new one takes the place of the oldest that is not needed."""

from __future__ import annotations

import time
from typing import Protocol

from clawstream.runtime.logs import logger
from clawstream.schemas.errors import SettingsError

FILES_KEPT = 128
"""Open files that are neither of clients nor of calls to engines: Kafka, spool, blobs, log."""
CALLS_KEPT_FREE = 64
"""Connections that calls in flight leave free for other requests."""
LOOKED_AT = 64
"""Connections that are examined for one that may be closed."""
LOG_EVERY_S = 60.0


def max_connections(files: int, max_in_flight: int) -> int:
    """Return the maximum number of client connections.

    A call in flight has two files open: its client and its engine. Idle clients may be as many
    again.

    Args:
        files: How many files the process may have open.
        max_in_flight: gateway.max_in_flight.
    """
    return max(2 * CALLS_KEPT_FREE, min((files - FILES_KEPT) // 2, 2 * max_in_flight + 1024))


def max_calls(files: int, max_in_flight: int) -> int:
    """Return the maximum number of calls in flight."""
    return min(max_in_flight, max_connections(files, max_in_flight) - CALLS_KEPT_FREE)


def check_open_files(files: int, max_in_flight: int) -> None:
    """Raise SettingsError if the files do not suffice for the calls in flight.

    Args:
        files, max_in_flight: See `max_connections`.
    """
    if (calls := max_calls(files, max_in_flight)) < max_in_flight:
        needed = 2 * (max_in_flight + CALLS_KEPT_FREE) + FILES_KEPT
        raise SettingsError(
            f"setting gateway.max_in_flight: {max_in_flight} calls need {needed} open files, "
            f"{files} are allowed; raise the hard limit (ulimit -Hn, LimitNOFILE of systemd), or "
            f"set gateway.max_in_flight={max(1, calls)}"
        )


class Limited(Protocol):
    """A connection. admitted: An authorized request is being served on it."""

    @property
    def admitted(self) -> bool: ...

    def abort(self) -> None:
        """Close the connection immediately."""
        ...


class ConnectionLimit:
    """Counts connections; at the limit, closes one for each new one.

    Connections of strangers, on which no request was authorized yet, go first, then those of known
    clients between two requests; of each kind the oldest. An authorized request is never cut off.

    most: Maximum number of connections.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._strangers: dict[Limited, None] = {}  # insertion order
        self._known: dict[Limited, None] = {}
        self._logged_s = float("-inf")

    def opened(self, connection: Limited) -> bool:
        """Count a new connection; return whether there is room for it."""
        if len(self._strangers) + len(self._known) >= self._most:
            self._log()
            victim = self._unneeded(self._strangers) or self._unneeded(self._known)
            if victim is None:
                return False
            self.lost(victim)
            victim.abort()
        self._strangers[connection] = None
        return True

    def known(self, connection: Limited) -> None:
        """Note that a request of the connection was authorized."""
        if connection in self._strangers:
            del self._strangers[connection]
            self._known[connection] = None

    def lost(self, connection: Limited) -> None:
        """Stop counting a connection."""
        self._strangers.pop(connection, None)
        self._known.pop(connection, None)

    def _unneeded(self, connections: dict[Limited, None]) -> Limited | None:
        """Return the oldest connection without an authorized request; move the others back."""
        for _ in range(min(LOOKED_AT, len(connections))):
            connection = next(iter(connections))
            if not connection.admitted:
                return connection
            del connections[connection]
            connections[connection] = None
        return None

    def _log(self) -> None:
        now = time.monotonic()
        if now - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now
            logger().warning(
                "connections_full",
                limit=self._most,
                do="idle and unauthorized connections are closed for new ones. The limit follows "
                "gateway.max_in_flight and the number of open files (ulimit -n)",
            )
