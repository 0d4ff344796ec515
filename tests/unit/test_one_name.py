"""The only importable name is `clawstream`: in a wheel, in the SDK's wheel and in a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(link.name for link in (ROOT / "clawstream").iterdir() if link.is_symlink())
ENTRIES = (
    "agent_flow.main",
    "cli.main",
    "demo.main",
    "gateway.app",
    "inspector.web.app",
    "rollout.main",
    "rollout.vllm_plugin.token_capture",
    "stream_jobs.assemble.main",
    "stream_jobs.lake.main",
    "trainer.main",
)


def unpacked(source: Path, folder: Path) -> Path:
    """Build the wheel of a folder without a network, and unpack it as an installation would."""
    build = ("-m", "hatchling", "build", "-t", "wheel", "-d", folder / "built")
    subprocess.run([sys.executable, *build], cwd=source, check=True, capture_output=True)
    (wheel,) = (folder / "built").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "installed")
    return folder / "installed"


def names_in(installed: Path) -> set[str]:
    return {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}


def run_beside_namesakes(installed: Path, folder: Path, code: str) -> str:
    """Run code in a folder whose modules have the names of our folders and fail on import."""
    for name in FOLDERS:
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name} of the user was imported')\n")
    # -S: without the link of this checkout into the environment.
    paths = (str(installed), *{sysconfig.get_path(name) for name in ("purelib", "platlib")})
    done = subprocess.run(
        [sys.executable, "-S", "-W", "ignore", "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_wheel_works_in_a_folder_full_of_its_names(tmp_path: Path) -> None:
    installed = unpacked(ROOT, tmp_path)
    assert names_in(installed) == {"clawstream"}
    ours = {path.relative_to(ROOT) for name in FOLDERS for path in (ROOT / name).rglob("*.py")}
    shipped = {
        path.relative_to(installed / "clawstream")
        for name in FOLDERS
        for path in (installed / "clawstream" / name).rglob("*.py")
    }
    assert shipped == ours
    modules = ", ".join(f"clawstream.{name}" for name in ENTRIES)
    code = f"import {modules}, sys; print(sys.modules['clawstream.gateway.app'].__file__)"
    file = run_beside_namesakes(installed, tmp_path, code)
    assert file.strip() == str(installed / "clawstream" / "gateway" / "app.py")


@pytest.mark.slow
def test_the_wheel_of_the_sdk_works_in_a_folder_full_of_its_names(tmp_path: Path) -> None:
    installed = unpacked(ROOT / "agent_flow", tmp_path)
    assert names_in(installed) == {"clawstream"}
    code = (
        "from clawstream.agent_flow import flow, main; from clawstream.agent_flow.rewards import *"
    )
    run_beside_namesakes(installed, tmp_path, code)


@pytest.mark.slow
def test_a_checkout_has_no_other_name(tmp_path: Path) -> None:
    code = (
        "import importlib.util, clawstream.gateway.errors; "
        f"print([n for n in {FOLDERS} if importlib.util.find_spec(n) is not None])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"
