"""Report readiness to the parent process by datagrams of systemd's sd_notify(3).

Without NOTIFY_SOCKET in the environment nothing is sent. The datagrams also work under a systemd
unit of `Type=notify`.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress

VARIABLE = "NOTIFY_SOCKET"
_DATAGRAM_BYTES = 4096


def ready(status: str = "") -> None:
    """Report that the process is ready. status: one line for people, such as the URL it serves."""
    _notify("READY=1", status)


def not_ready(status: str = "") -> None:
    """Report that the process is not ready. status: one line for people, such as the reason."""
    _notify("RELOADING=1", status)


def _notify(state: str, status: str) -> None:
    address = os.environ.get(VARIABLE)
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    line = " ".join(status.split())[:1000]
    # Whoever does not listen any more, or for so long that its buffer is full, learns nothing.
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(f"{state}\nSTATUS={line}\n".encode(), address)


class ReadinessListener:
    """Hears what one process says of its readiness, on the running event loop. `close` ends it.

    heard: Called with whether the process is ready, and its status.
    """

    def __init__(self, heard: Callable[[bool, str], None]) -> None:
        self._heard = heard
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        # The kernel chooses a free abstract name: the path of a data directory may be too long.
        self._socket.bind("")
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._read)

    @property
    def address(self) -> str:
        """The value of NOTIFY_SOCKET for the process."""
        name = self._socket.getsockname()
        return "@" + (name.decode() if isinstance(name, bytes) else name)[1:]

    def _read(self) -> None:
        try:
            words = self._socket.recv(_DATAGRAM_BYTES).decode(errors="replace").splitlines()
        except OSError:
            return
        fields = dict(word.split("=", 1) for word in words if "=" in word)
        if "READY" in fields or "RELOADING" in fields:
            self._heard("READY" in fields, fields.get("STATUS", ""))

    def close(self) -> None:
        """Hear nothing more."""
        self._loop.remove_reader(self._socket)
        self._socket.close()
