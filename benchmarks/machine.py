"""Describe the machine that a benchmark ran on, and round its figures."""

from __future__ import annotations

import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any


def loop_ns() -> float:
    """Return CPU nanoseconds of one turn of an empty Python loop, median of five.

    It shows how fast the machine is at this moment.
    """
    turns, found = 1_000_000, []
    for _ in range(5):
        began = time.process_time()
        for _ in range(turns):
            pass
        found.append(1e9 * (time.process_time() - began) / turns)
    return round(statistics.median(found), 1)


def machine() -> dict[str, Any]:
    """Return CPU model, cores, Python version, speed and load."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.split(":")[1].strip() for line in lines if "model name" in line)
    return {
        "cpu": next(models, "?"),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "empty_loop_ns": loop_ns(),
        "load1": round(os.getloadavg()[0], 2),
    }


def rounded(value: Any) -> Any:
    """Round all floats of a result, also inside of dictionaries, to three digits."""
    if isinstance(value, dict):
        return {name: rounded(inner) for name, inner in value.items()}
    return round(value, 3) if isinstance(value, float) else value
