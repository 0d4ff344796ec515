"""The demo's directory."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from clawstream.demo.configuration import demo_settings
from clawstream.demo.main import fresh_home, make_model
from clawstream.runtime.process.supervisor import AlreadyRunning, Supervisor
from clawstream.schemas.settings import Settings


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


@pytest.mark.slow
def test_the_engine_serves_the_dtype_that_the_model_is_saved_in(tmp_path: Path) -> None:
    given = Settings.model_validate({"data_dir": tmp_path, "demo": {"dtype": "bfloat16"}})
    settings = demo_settings(given)
    assert settings.rollout.dtype == "bfloat16"
    (tmp_path / "logs").mkdir()
    asyncio.run(make_model(settings, "boot", tmp_path / "boot"))
    assert json.loads((tmp_path / "boot" / "config.json").read_text())["dtype"] == "bfloat16"
