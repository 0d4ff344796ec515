"""The supervisor with real processes.

A dead process is restarted, a fenced process stays down, and a stop ends all processes.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs
from support.patience import until_async
from typer.testing import CliRunner

from clawstream.cli.main import app
from clawstream.runtime.exit_codes import EXIT_FAILED, EXIT_FENCED, EXIT_SETTINGS
from clawstream.runtime.process.supervisor import (
    AlreadyRunning,
    ProcessSpec,
    Supervisor,
    ask_to_stop,
)
from clawstream.runtime.process.table import read_table

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
DEAF = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('up', flush=True); time.sleep(600)",
]

KILLED_ITSELF = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]


def exits(code: int) -> list[str]:
    return [sys.executable, "-c", f"raise SystemExit({code})"]


def pid_of(supervisor: Supervisor, name: str) -> int | None:
    pid = supervisor.table[name]["pid"]
    assert pid is None or isinstance(pid, int)
    return pid


def restarts_of(supervisor: Supervisor, name: str) -> int:
    restarts = supervisor.table[name]["restarts"]
    assert isinstance(restarts, int)
    return restarts


def test_killed_process_comes_back(tmp_path: Path) -> None:
    async def body() -> None:
        async with Supervisor(tmp_path, restart_delay_s=0.05) as supervisor:
            supervisor.start(ProcessSpec("a", SLEEP))
            await until_async(lambda: pid_of(supervisor, "a") is not None)
            first = pid_of(supervisor, "a")
            assert first is not None
            os.kill(first, signal.SIGKILL)
            await until_async(lambda: pid_of(supervisor, "a") not in (None, first))
            assert supervisor.table["a"]["restarts"] == 1
            await until_async(
                lambda: read_table(tmp_path)["processes"]["a"]["pid"] == pid_of(supervisor, "a")
            )
            written = read_table(tmp_path)
            assert (
                written["supervisor"] == os.getpid() and written["processes"]["a"]["restarts"] == 1
            )
            second = pid_of(supervisor, "a")
            await supervisor.stop_all()
            assert not psutil.pid_exists(second or 0)
            assert supervisor.state("a") == "stopped"

    asyncio.run(body())


@pytest.mark.parametrize(
    ("code", "why"), [(EXIT_FENCED, "fenced"), (EXIT_SETTINGS, "wrong settings"), (0, "done")]
)
def test_process_that_must_not_restart_stays_down(tmp_path: Path, code: int, why: str) -> None:
    async def body() -> None:
        async with Supervisor(tmp_path, restart_delay_s=0.01) as supervisor:
            supervisor.start(ProcessSpec("a", exits(code)))
            assert await asyncio.wait_for(supervisor.wait_down("a"), 60) == why
            assert supervisor.table["a"]["restarts"] == 0

    asyncio.run(body())


def test_crashing_process_is_restarted_ever_more_slowly(tmp_path: Path) -> None:
    async def body() -> None:
        async with Supervisor(tmp_path, restart_delay_s=0.02) as supervisor:
            supervisor.start(ProcessSpec("a", exits(70)))
            await until_async(lambda: restarts_of(supervisor, "a") >= 4)
            await supervisor.stop_all()
            assert supervisor.table["a"]["exit_code"] == 70

    started = time.monotonic()
    asyncio.run(body())
    assert time.monotonic() - started >= 0.02 + 0.04 + 0.08


@pytest.mark.parametrize("ends", [KILLED_ITSELF, exits(128 + signal.SIGKILL)])
def test_killed_process_is_not_restarted_more_slowly(tmp_path: Path, ends: list[str]) -> None:
    async def body() -> None:
        async with Supervisor(tmp_path, restart_delay_s=0.02) as supervisor:
            supervisor.start(ProcessSpec("a", ends))
            with capture_logs() as logged:
                await until_async(lambda: restarts_of(supervisor, "a") >= 5)
            await supervisor.stop_all()
            assert [e["delay_s"] for e in logged if e["event"] == "restart"][:5] == [0.02] * 5

    asyncio.run(body())


def test_process_deaf_to_sigterm_is_killed(tmp_path: Path) -> None:
    async def body() -> None:
        async with Supervisor(tmp_path, stop_timeout_s=0.5) as supervisor:
            supervisor.start(ProcessSpec("a", DEAF))
            await until_async(
                lambda: (
                    (tmp_path / "logs" / "a.log").exists()
                    and "up" in (tmp_path / "logs" / "a.log").read_text()
                )
            )
            await supervisor.stop("a")
            assert supervisor.table["a"]["exit_code"] == -signal.SIGKILL

    asyncio.run(body())


def test_second_supervisor_is_refused(tmp_path: Path) -> None:
    first, second = Supervisor(tmp_path), Supervisor(tmp_path)
    first.acquire()
    with pytest.raises(AlreadyRunning, match="set another data_dir"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()


@pytest.mark.parametrize("child", [SLEEP, DEAF], ids=["sleeps", "deaf"])
def test_children_end_with_a_killed_supervisor(tmp_path: Path, child: list[str]) -> None:
    code = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from clawstream.runtime.process.supervisor import ProcessSpec, Supervisor\n"
        "async def main():\n"
        f"    async with Supervisor(Path({str(tmp_path)!r})) as s:\n"
        f"        s.start(ProcessSpec('a', {child!r}))\n"
        "        while not s.table['a']['pid']: await asyncio.sleep(0.01)\n"
        "        print(s.table['a']['pid'], flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        process = psutil.Process(int(supervisor.stdout.readline()))
        supervisor.kill()
        supervisor.wait()
        process.wait(60)
        assert not process.is_running()


def test_what_cannot_be_spawned_is_tried_again(tmp_path: Path) -> None:
    async def body() -> None:
        async with Supervisor(tmp_path, restart_delay_s=0.01) as supervisor:
            supervisor.start(ProcessSpec("absent", [str(tmp_path / "no-such-program")]))
            await until_async(lambda: restarts_of(supervisor, "absent") >= 2)
            await supervisor.stop_all()
            assert supervisor.state("absent") == "stopped"

    asyncio.run(body())


def test_stopped_right_after_its_start(tmp_path: Path) -> None:
    async def body() -> None:
        async with Supervisor(tmp_path, stop_timeout_s=60.0) as supervisor:
            supervisor.start(ProcessSpec("sleeper", SLEEP))
            async with asyncio.timeout(60):
                await supervisor.stop("sleeper")
            row = supervisor.table["sleeper"]
            assert (row["state"], row["exit_code"]) == ("stopped", -signal.SIGTERM)

    asyncio.run(body())


def test_asked_to_stop_by_another_process(tmp_path: Path) -> None:
    assert ask_to_stop(tmp_path) is None
    code = (
        "import sys, time; from pathlib import Path; "
        "from clawstream.runtime.process.supervisor import Supervisor; "
        "Supervisor.acquire(s := Supervisor(Path(sys.argv[1]))); "
        "print('up', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE
    ) as running:
        assert running.stdout is not None and running.stdout.readline() == b"up\n"
        with pytest.raises(AlreadyRunning):
            Supervisor(tmp_path).acquire()
        assert ask_to_stop(tmp_path) == running.pid
        assert running.wait(60) == -signal.SIGTERM
    assert ask_to_stop(tmp_path) is None, "its pid may be anybody's by now"


def test_an_exception_in_a_task_of_the_supervisor_ends_everything_and_is_raised(
    tmp_path: Path,
) -> None:
    pids: list[int | None] = []

    async def body() -> None:
        async with Supervisor(tmp_path) as supervisor:
            supervisor.start(ProcessSpec("a", SLEEP))
            await until_async(lambda: pid_of(supervisor, "a") is not None)
            pids.append(pid_of(supervisor, "a"))
            # its table cannot be written any more, and the cause is not a full disk
            shutil.rmtree(tmp_path)
            os.kill(pids[0] or 0, signal.SIGKILL)
            await asyncio.sleep(600)

    with pytest.raises(ExceptionGroup) as error:
        asyncio.run(body())
    assert [type(e) for e in error.value.exceptions] == [FileNotFoundError]
    assert not psutil.pid_exists(pids[0] or 0)


def test_what_a_process_says_of_its_readiness_is_in_the_table(tmp_path: Path) -> None:
    says = (
        "import sys, time; from clawstream.runtime.process.readiness import ready, not_ready; "
        "ready('first\\nline'); sys.stdin.readline(); "
        "not_ready('lost'); time.sleep(600)"
    )

    async def body() -> None:
        async with Supervisor(tmp_path) as supervisor:
            with capture_logs() as logged:
                supervisor.start(ProcessSpec("a", [sys.executable, "-c", says], b"go on"))
                await supervisor.wait_settled(["a"])
                await until_async(lambda: supervisor.table["a"]["status"] == "lost")
            assert supervisor.table["a"]["ready"] is False
            told = [(e["event"], e["name"], e["status"]) for e in logged]
            assert told == [("ready", "a", "first line"), ("not_ready", "a", "lost")]

    asyncio.run(body())


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise ValueError('no such thing')", "ValueError: no such thing"),
        (
            "import sys; sys.exit('clawstream: setting a.b: wrong')",
            "clawstream: setting a.b: wrong",
        ),
        (
            "from clawstream.runtime.process.lifecycle import die; "
            "from clawstream.runtime.logs import configure; "
            "configure('a'); die(KeyError('k'))",
            "'k'",
        ),
    ],
)
def test_the_last_error_line_of_a_process_is_shown(tmp_path: Path, code: str, error: str) -> None:
    async def body() -> None:
        async with Supervisor(tmp_path, restart_delay_s=600) as supervisor:
            with capture_logs() as logged:
                supervisor.start(ProcessSpec("a", [sys.executable, "-c", code]))
                await until_async(lambda: restarts_of(supervisor, "a") == 1)
            assert supervisor.table["a"]["error"] == error
            assert [e["error"] for e in logged if e["event"] == "restart"] == [error]

    asyncio.run(body())


def test_down_tells_of_a_supervisor_that_died_before_it_had_stopped_all(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time; from pathlib import Path; "
        "from clawstream.runtime.process.supervisor import Child, ProcessSpec, Supervisor; "
        "s = Supervisor(Path(sys.argv[1])); s.acquire(); "
        "s._children['lake'] = Child(ProcessSpec('lake', []), None, 'running'); "
        "s._file.write(); print('up', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE
    ) as running:
        assert running.stdout is not None and running.stdout.readline() == b"up\n"
        done = CliRunner().invoke(app, ["down", f"data_dir={tmp_path}"])
    assert done.exit_code == EXIT_FAILED
    assert f"pid {running.pid}, has died before it had stopped lake" in done.stderr
    assert "stopped" not in done.stdout
