"""Who does something, for the record."""

from __future__ import annotations

import getpass
import os
import socket


def current_user() -> str:
    """user@host. An account without a name, as in a container, is its number."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
