"""A benchmark that is ended in any way leaves no server behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[3]
BENCHMARK = """
import sys, time
from pathlib import Path
from benchmarks.processes import running
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
with running("sleep", sleep, Path(sys.argv[1])) as server:
    print(server.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_server_ends_with_its_benchmark(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", BENCHMARK, str(tmp_path / "log")]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as benchmark:
        assert benchmark.stdout is not None
        server = psutil.Process(int(benchmark.stdout.readline()))
        benchmark.send_signal(number)
        server.wait(60)
