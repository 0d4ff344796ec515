"""Ports that a process is about to listen on."""

from __future__ import annotations

import socket

from clawstream.runtime.errors import InUse


class PortTaken(InUse):
    """Another process listens on the port. The message names the port and its setting."""


def check_free(host: str, port: int, what: str, setting: str) -> None:
    """Raise PortTaken when a server could not listen there.

    Args:
        host: The address to listen on.
        port: The port; 0 is always free.
        what: Who wants the port, for the message.
        setting: The setting that names the port, for the message.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise taken(host, port, what, setting, error) from error


def taken(host: str, port: int, what: str, setting: str, error: OSError) -> PortTaken:
    """Return the error of a process that could not listen."""
    return PortTaken(
        f"{what} cannot listen on {host}:{port}: {error.strerror}. Stop the process that listens "
        f"there, or set {setting}"
    )
