"""The system calls that sandboxed code may not make, as a program for the kernel's filter."""

from __future__ import annotations

import struct
from collections.abc import Mapping

_LOAD, _EQUAL, _AT_LEAST, _RETURN, _AND = 0x20, 0x15, 0x35, 0x06, 0x54
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | 1
"""SECCOMP_RET_ALLOW, SECCOMP_RET_KILL_PROCESS, SECCOMP_RET_ERRNO with EPERM."""
_X32_BIT = 0x40000000
"""In the numbers of x32, which has the architecture of x86-64; others have no such number."""
_NUMBER, _ARCHITECTURE, _ARGUMENT_0, _ARGUMENT_3 = 0, 4, 16, 40
"""Offsets in `struct seccomp_data`; of the arguments the lower half."""
_SHARED_ANONYMOUS = 0x21
"""MAP_SHARED | MAP_ANONYMOUS."""
_AF_UNIX = 1

ARCHITECTURES: Mapping[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""`uname -m` to AUDIT_ARCH; both are little-endian."""
REFUSED: Mapping[str, tuple[int, int]] = {
    # Memory that no limit of the sandbox counts.
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # Interfaces of the kernel that an answer does not need and that had many faults.
    "ptrace": (101, 117),
    "mount": (165, 40),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "unshare": (272, 97),
    "perf_event_open": (298, 241),
    "setns": (308, 268),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
}
"""Name to number on each of `ARCHITECTURES`."""
CHECKED: Mapping[str, tuple[int, int]] = {
    "mmap": (9, 222),
    "socket": (41, 198),
    "socketpair": (53, 199),
}
"""Calls that are refused for some of their arguments."""


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return one instruction of classic BPF. if_true, if_false: instructions to skip."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _argument_checks(mmap: int, socket: int, socketpair: int) -> list[bytes]:
    """Return the instructions for calls that depend on an argument. The next two allow and refuse.

    Pages of a shared anonymous mapping stay in memory when no process has them, so the resident
    memory does not count them; nor does it count what a loopback connection holds.
    """
    return [
        _instruction(_EQUAL, mmap, if_false=3),
        _instruction(_LOAD, _ARGUMENT_3),
        _instruction(_AND, _SHARED_ANONYMOUS),
        _instruction(_EQUAL, _SHARED_ANONYMOUS, if_true=5, if_false=4),
        _instruction(_EQUAL, socket, if_true=1),
        _instruction(_EQUAL, socketpair, if_false=2),
        _instruction(_LOAD, _ARGUMENT_0),
        _instruction(_EQUAL, _AF_UNIX, if_false=1),
    ]


def filter_program(machine: str) -> bytes:
    """Return the filter of a machine, which is one of `ARCHITECTURES`.

    It refuses the calls of `REFUSED`, shared anonymous memory and all sockets but Unix's, and kills
    on another architecture's calls. Format: `struct sock_filter[]` of seccomp(2).
    """
    column = list(ARCHITECTURES).index(machine)
    refused = [numbers[column] for numbers in REFUSED.values()]
    checks = _argument_checks(*(numbers[column] for numbers in CHECKED.values()))
    count = len(refused) + len(checks)
    return b"".join(
        [
            _instruction(_LOAD, _ARCHITECTURE),
            _instruction(_EQUAL, ARCHITECTURES[machine], if_true=1),
            _instruction(_RETURN, _KILL),
            _instruction(_LOAD, _NUMBER),
            _instruction(_AT_LEAST, _X32_BIT, if_true=count + 1),
            *(
                _instruction(_EQUAL, number, if_true=count - index)
                for index, number in enumerate(refused)
            ),
            *checks,
            _instruction(_RETURN, _ALLOW),
            _instruction(_RETURN, _REFUSE),
        ]
    )
