"""The demo's directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.main import fresh_home
from runtime.supervisor import AlreadyRunning, Supervisor


def test_the_last_run_is_kept_once(tmp_path: Path) -> None:
    home = tmp_path / "demo"
    for run in ("one", "two", "three"):
        fresh_home(home)
        assert [p.name for p in home.iterdir()] == ["logs"]
        (home / "report.json").write_text(run)
    assert (tmp_path / "demo.previous" / "report.json").read_text() == "two"


def test_a_run_that_is_not_over_keeps_its_directory(tmp_path: Path) -> None:
    home = tmp_path / "demo"
    fresh_home(home)
    running = Supervisor(home)
    running.acquire()
    with pytest.raises(AlreadyRunning):
        fresh_home(home)
    assert home.exists() and not (tmp_path / "demo.previous").exists()
    running.release()
    fresh_home(home)
