"""The system calls that sandboxed code may not make, as a program for the kernel's filter."""

from __future__ import annotations

import struct

_LOAD, _EQUAL, _AT_LEAST, _RETURN, _AND = 0x20, 0x15, 0x35, 0x06, 0x54
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | 1
"""SECCOMP_RET_ALLOW, SECCOMP_RET_KILL_PROCESS, SECCOMP_RET_ERRNO with EPERM."""
_X86_64, _X32_BIT = 0xC000003E, 0x40000000
_NUMBER, _ARCHITECTURE, _ARGUMENT_0, _ARGUMENT_3 = 0, 4, 16, 40
"""Offsets in `struct seccomp_data`; of the arguments the lower half."""
_MMAP, _SOCKET, _SOCKETPAIR = 9, 41, 53
_SHARED_ANONYMOUS = 0x21
"""MAP_SHARED | MAP_ANONYMOUS."""
_AF_UNIX = 1

REFUSED = {
    # Memory that no limit of the sandbox counts.
    "shmget": 29,
    "msgget": 68,
    "semget": 64,
    "mq_open": 240,
    "memfd_create": 319,
    "memfd_secret": 447,
    # Interfaces of the kernel that an answer does not need and that had many faults.
    "ptrace": 101,
    "mount": 165,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "unshare": 272,
    "perf_event_open": 298,
    "setns": 308,
    "bpf": 321,
    "userfaultfd": 323,
    "io_uring_setup": 425,
}
"""Name to number on x86-64."""


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return one instruction of classic BPF. if_true, if_false: instructions to skip."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _argument_checks() -> list[bytes]:
    """Return the instructions for calls that depend on an argument. The next two allow and refuse.

    Pages of a shared anonymous mapping stay in memory when no process has them, so the resident
    memory does not count them; nor does it count what a loopback connection holds.
    """
    return [
        _instruction(_EQUAL, _MMAP, if_false=3),
        _instruction(_LOAD, _ARGUMENT_3),
        _instruction(_AND, _SHARED_ANONYMOUS),
        _instruction(_EQUAL, _SHARED_ANONYMOUS, if_true=5, if_false=4),
        _instruction(_EQUAL, _SOCKET, if_true=1),
        _instruction(_EQUAL, _SOCKETPAIR, if_false=2),
        _instruction(_LOAD, _ARGUMENT_0),
        _instruction(_EQUAL, _AF_UNIX, if_false=1),
    ]


def filter_program() -> bytes:
    """Return the filter.

    It refuses the calls of `REFUSED`, shared anonymous memory and all sockets but Unix's, and kills
    on another architecture's calls. Format: `struct sock_filter[]` of seccomp(2).
    """
    checks = _argument_checks()
    count = len(REFUSED) + len(checks)
    return b"".join(
        [
            _instruction(_LOAD, _ARCHITECTURE),
            _instruction(_EQUAL, _X86_64, if_true=1),
            _instruction(_RETURN, _KILL),
            _instruction(_LOAD, _NUMBER),
            _instruction(_AT_LEAST, _X32_BIT, if_true=count + 1),
            *(
                _instruction(_EQUAL, number, if_true=count - index)
                for index, number in enumerate(REFUSED.values())
            ),
            *checks,
            _instruction(_RETURN, _ALLOW),
            _instruction(_RETURN, _REFUSE),
        ]
    )
