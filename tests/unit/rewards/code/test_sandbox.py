"""What a hostile program can do in the sandbox, on the real bubblewrap.

A machine without bubblewrap shows only that code rewards are refused there.
"""

from __future__ import annotations

import os
import socket
import struct
import time

import pytest
from support.processes import pids_with, until

from clawstream.rewards.code.sandbox import Limits, Result, Sandbox, SandboxError
from clawstream.rewards.code.seccomp import ARCHITECTURES, CHECKED, REFUSED, filter_program
from clawstream.rewards.results import rules_of
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import JobsSettings, Settings
from clawstream.schemas.user_function import FunctionNotFound


@pytest.fixture(scope="module")
def sandbox(bubblewrap: None) -> Sandbox:
    return Sandbox(Limits(memory_mb=128, processes=8))


def run(sandbox: Sandbox, program: str, seconds: float = 20.0, stdin: bytes = b"") -> Result:
    return sandbox.run(program, stdin, time.monotonic() + seconds)


def test_a_machine_without_bubblewrap_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match=r"need bwrap \(apt-get install bubblewrap\)"):
        Sandbox(Limits(128, 8))


def test_a_machine_of_another_architecture_is_named() -> None:
    with pytest.raises(SandboxError, match=r"do not run on riscv64: .* x86_64 and aarch64"):
        Sandbox(Limits(128, 8), machine="riscv64")


def decided(machine: str, architecture: int, number: int, *arguments: int) -> int:
    """Return what the filter of a machine answers to a system call: a small interpreter of BPF."""
    padded = (*arguments, *(0 for _ in range(6 - len(arguments))))
    data = struct.pack("<IIQ6Q", number, architecture, 0, *padded)
    program = list(struct.iter_unpack("=HBBI", filter_program(machine)))
    at = value = 0
    while True:
        code, if_true, if_false, operand = program[at]
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("<I", data, operand)
        elif code == 0x54:
            value &= operand
        elif code == 0x06:
            return operand
        else:
            is_true = value == operand if code == 0x15 else value >= operand
            at += if_true if is_true else if_false


@pytest.mark.parametrize(("column", "machine"), list(enumerate(ARCHITECTURES)))
def test_the_filter_of_each_architecture(column: int, machine: str) -> None:
    allow, refuse, kill = 0x7FFF0000, 0x00050001, 0x80000000
    here = ARCHITECTURES[machine]
    mmap, socket_, socketpair = (numbers[column] for numbers in CHECKED.values())
    cases = [(numbers[column], (), refuse) for numbers in REFUSED.values()]
    cases += [
        *((mmap, (0, 4096, 3, 0x21), refuse), (mmap, (0, 4096, 3, 0x22), allow)),
        *((mmap, (0, 4096, 3, 0x01), allow), (socket_, (2,), refuse), (socket_, (1,), allow)),
        *((socketpair, (1,), allow), (socketpair, (16,), refuse)),
        *((0, (), allow), (1, (), allow), (63, (), allow), (0x40000000 | 1, (), refuse)),
    ]
    assert [decided(machine, here, number, *given) for number, given, _ in cases] == [
        answer for *_, answer in cases
    ]
    assert decided(machine, 0x40000003, 1) == kill


def test_a_program_reads_its_input_and_its_exit_code_is_known(sandbox: Sandbox) -> None:
    program = "import sys; print(sys.stdin.read()[::-1]); sys.exit(3)"
    assert run(sandbox, program, stdin=b"abc") == Result("exited", 3, b"cba\n")


FORKS = """
import os, time
children = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(3600)
        children += 1
except OSError:
    print(children < 8)
"""
FILLS = """
for folder in ("/tmp", "/dev/shm", "/", "/dev", "/usr"):
    written = 0
    try:
        for number in range(64):
            with open(f"{folder}/{number}", "wb") as file:
                file.write(bytes(1 << 20))
            written += 1
    except OSError:
        pass
    print(folder, written <= 16)
"""
CONNECTS = """
import socket
for address in (("127.0.0.1", PORT), ("198.51.100.1", 53)):
    try:
        socket.create_connection(address, 5)
    except OSError as e:
        print("refused")
"""
CALLS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for call in ((29, 0, 1 << 20, 0o1600), (319, b"x", 0), (272, 0x10000000), (56, 0x10000011, 0)):
    print(libc.syscall(*call))
"""
LOOKS = """
import os
print(os.getuid(), sorted(os.listdir("/")), os.listdir("/tmp"), sorted(os.environ))
print(all(int(name) < 10 for name in os.listdir("/proc") if name.isdigit()))
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("CapEff")])
"""


def test_a_program_cannot_fork_without_end(sandbox: Sandbox) -> None:
    assert run(sandbox, FORKS).stdout == b"True\n"


def test_a_program_cannot_fill_the_disk(sandbox: Sandbox) -> None:
    said = run(sandbox, FILLS).stdout.decode().splitlines()
    assert [line.endswith("True") for line in said] == [True] * 5
    endless = run(sandbox, "while True: print('x' * 1000000)")
    assert endless.code != 0 and len(endless.stdout) <= 16 << 20


def test_a_program_cannot_open_a_connection(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = CONNECTS.replace("PORT", str(server.getsockname()[1]))
        assert run(sandbox, program).stdout == b"refused\n" * 2


def test_a_program_cannot_make_namespaces_or_uncounted_memory(sandbox: Sandbox) -> None:
    assert run(sandbox, CALLS).stdout == b"-1\n" * 4


SHARES = """
import mmap, multiprocessing, socket
def allowed(call, *given):
    try:
        call(*given)
        return True
    except OSError:
        return False
print(allowed(mmap.mmap, -1, 4096), allowed(open, "/dev/zero", "r+b"))
print(allowed(socket.socket, socket.AF_INET), allowed(socket.socketpair, socket.AF_INET6))
print(allowed(socket.socketpair), allowed(mmap.mmap, -1, 4096, mmap.MAP_PRIVATE))
print(allowed(multiprocessing.Lock))
"""


def test_a_program_has_no_shared_memory_that_is_not_counted(sandbox: Sandbox) -> None:
    said = run(sandbox, SHARES).stdout.decode().splitlines()
    assert said == ["False False", "False False", "True True", "True"]


def test_a_program_sees_nothing_of_the_machine(sandbox: Sandbox) -> None:
    seen = run(sandbox, LOOKS).stdout.decode().splitlines()
    assert seen[0].startswith("65534 ") and "'root'" not in seen[0] and "'home'" not in seen[0]
    assert seen[0].endswith("[] ['HOME', 'LC_CTYPE', 'PATH', 'PWD']")
    assert seen[1:] == ["True", "['0000000000000000']"]


def test_a_program_that_eats_memory_ends(sandbox: Sandbox) -> None:
    alone = run(sandbox, "held = bytearray(1 << 30)")
    assert (alone.ending, alone.code) == ("exited", 1)
    shared = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        held = bytearray(b"x") * (40 << 20)
        time.sleep(3600)
time.sleep(3600)
"""
    assert run(sandbox, shared, 60).ending == "memory"


def test_nothing_outlives_the_time_limit(sandbox: Sandbox) -> None:
    program = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(3600)", "WORD"])
while True: pass
"""
    word = f"outlives-{os.getpid()}"
    ended = run(sandbox, program.replace("WORD", word), 1.0)
    assert (ended.ending, ended.code) == ("timeout", None)
    until(lambda: not pids_with(word))  # the kernel ends a namespace asynchronously


def test_a_killed_program_is_no_failed_start(sandbox: Sandbox) -> None:
    assert run(sandbox, "import os; os.kill(os.getpid(), 9)").code == -9
    assert run(sandbox, "import sys; sys.stderr.write('bwrap: no'); sys.exit(1)").code == 1


@pytest.mark.parametrize("code", [128, 193, 255])
def test_an_exit_code_that_is_no_signal_stays_as_it_is(sandbox: Sandbox, code: int) -> None:
    """bubblewrap reports a signal as 128 + its number, from 129 to 192."""
    ended = run(sandbox, f"import sys; sys.exit({code})")
    assert (ended.ending, ended.code) == ("exited", code)


def test_a_sandbox_that_does_not_start_is_an_error(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clawstream.rewards.code.sandbox._DISK_BYTES", -1)
    with pytest.raises(SandboxError, match="the sandbox did not start: "):
        run(sandbox, "print(1)")


def test_the_refusal_names_the_setting() -> None:
    def find(target: str, configuration: str) -> None:
        raise FunctionNotFound("SandboxError: no bwrap")

    jobs = JobsSettings.model_validate(
        {"reward_functions": {"*": ["tests@1"]}, "reward_models": {"tests": {"type": "code"}}}
    )
    with pytest.raises(SettingsError, match=r"^setting jobs\.reward_models\.tests: SandboxError"):
        rules_of(Settings(jobs=jobs), find)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limit", "message"),
    [({"timeout_s": 29}, "timeout_s=29 must be"), ({"memory_mb": 5000}, "memory_mb=5000 is above")],
)
def test_a_limit_above_that_of_its_process_is_refused(limit: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=rf"jobs\.reward_models\.tests\.{message}"):
        Settings.model_validate({"jobs": {"reward_models": {"tests": {"type": "code", **limit}}}})
