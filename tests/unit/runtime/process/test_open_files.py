"""The limit of open files, and errors that come from it."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import sys

from support.open_files import no_file_left

from clawstream.runtime.process.open_files import exhausted, highest_limit

RAISES = """
import resource
from clawstream.runtime.process.open_files import highest_limit, limit, raise_limit
raise_limit()
print(limit() == highest_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    hard = min(300, highest_limit())
    done = subprocess.run(
        [sys.executable, "-c", RAISES],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True\n"


def test_an_error_tells_whether_files_were_the_cause() -> None:
    unresolved = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    refused = ConnectionRefusedError(errno.ECONNREFUSED, "refused")
    assert [exhausted(e) for e in (unresolved, refused, ValueError())] == [None] * 3
    with no_file_left():
        try:
            os.dup(0)
        except OSError as error:
            assert "EMFILE" in (exhausted(error) or "")
        assert exhausted(unresolved) is not None and exhausted(refused) is None
