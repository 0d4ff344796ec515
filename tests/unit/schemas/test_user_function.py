"""Test the single rule by which every command finds a user's function.

The function is named by file or module, in the folders of the settings.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clawstream.ops.up import python
from clawstream.runtime.process.config import load
from clawstream.schemas.records import Trajectory, TrajectoryStep
from clawstream.schemas.user_function import FunctionNotFound, load_function

ROOT = Path(__file__).parents[3]
GIVES = "def f(t):\n    return {value}\n"


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Undo the imports of a test."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    made = [tmp_path / "here", tmp_path / "config"]
    for folder in made:
        folder.mkdir()
    return made


@pytest.mark.parametrize("name", ["rewards", "quality", "demo", "math", "schemas", "mine"])
def test_a_file_may_have_any_name(folders: list[Path], name: str) -> None:
    (folders[0] / f"{name}.py").write_text(GIVES.format(value=7))
    assert load_function(f"{name}.py:f", folders)(None) == 7


def test_the_first_folder_comes_first_and_a_path_is_itself(folders: list[Path]) -> None:
    for value, folder in enumerate(folders):
        (folder / "mine.py").write_text(GIVES.format(value=value))
    (folders[1] / "below").mkdir()
    (folders[1] / "below" / "other.py").write_text("import beside\nf = beside.f\n")
    (folders[1] / "below" / "beside.py").write_text(GIVES.format(value=3))
    assert load_function("mine.py:f", folders)(None) == 0
    assert load_function(f"{folders[1]}/mine.py:f", folders)(None) == 1
    assert load_function("below/other.py:f", folders)(None) == 3


def test_modules_and_packages_of_the_folders(folders: list[Path]) -> None:
    package = folders[1] / "my_rules"
    package.mkdir()
    (package / "__init__.py").write_text("from my_rules.deep import f\n")
    (package / "deep.py").write_text(GIVES.format(value=5))
    assert (
        load_function("my_rules:f", folders)(None)
        == load_function("my_rules.deep:f", folders)(None)
        == 5
    )
    assert load_function("clawstream.rewards.exact_match:exact_match", folders) is not None


@pytest.mark.parametrize("name", ["rewards", "rewards.mine", "statistics"])
def test_a_module_that_another_one_hides_is_named_as_a_file(folders: list[Path], name: str) -> None:
    file = folders[0].joinpath(*name.split(".")).with_suffix(".py")
    file.parent.mkdir(exist_ok=True)
    file.write_text(GIVES.format(value=1))
    with pytest.raises(FunctionNotFound, match=r"which hides .*: name the file"):
        load_function(f"{name}:f", folders)


@pytest.mark.parametrize(
    ("text", "target", "why"),
    [
        ("", "mine.py:f", r"mine\.py has no f"), ("f = 3", "mine.py:f", "not callable"),
        ("import no_such", "mine.py:f", r"ModuleNotFoundError: .*mine\.py, line 1"),
        ("def f(:", "mine.py:f", "SyntaxError"),
        ("1 / 0", "mine:f", "ZeroDivisionError"),
        ("", "none.py:f", "no file none.py in .*here, .*config"),
        ("", "none:f", "No module named 'none'"), ("", ":f", "ValueError"),
    ],
)  # fmt: skip
def test_why_a_function_is_not_there(folders: list[Path], text: str, target: str, why: str) -> None:
    (folders[0] / "mine.py").write_text(text)
    with pytest.raises(FunctionNotFound, match=why):
        load_function(target, folders)


def test_settings_remember_where_functions_are_looked_up(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folders[0])
    file = folders[1] / "settings.yaml"
    file.write_text("jobs: {reward_functions: {'*': ['mine.py:f@1']}}\n")
    assert load(file, environ={}).functions.folders == tuple(folders)
    assert load(file, ["functions.dirs=[/elsewhere]"], environ={}).functions.folders == (
        Path("/elsewhere"),
    )
    assert load(overrides=["gateway.compute_reward=mine:f@1"], environ={}).functions.folders == (
        folders[0],
    )
    assert load(overrides=["gateway.compute_reward=exact_match@1"], environ={}).functions.dirs == ()


@pytest.mark.slow
def test_files_in_the_working_directory_hide_nothing_from_our_own_processes(tmp_path: Path) -> None:
    for name in ("rewards", "schemas", "runtime"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong file')\n")
    done = subprocess.run(
        python("jobs", "--help"), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_example_of_the_docs_works(folders: list[Path]) -> None:
    example, *_ = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "reward-functions.md").read_text(), re.DOTALL
    )
    (folders[0] / "rewards.py").write_text(example)
    right, short = (load_function(f"rewards.py:{name}", folders) for name in ("right", "short"))
    step = TrajectoryStep(
        step_id="k~1.0", index=0, status="ok", drift="root", prompt_tokens=1, response_tokens=1001,
        response_json=b'{"content":"It is 42."}', trainable=True, offset=0,
    )  # fmt: skip
    asked = Trajectory(
        run_id="r",
        trajectory_key="k",
        trajectory_id="k",
        group_id="g",
        channel="train",
        outcome="completed",
        opened_at=0,
        closed_at=1,
        metadata_json=b'{"gold":42}',
        part=0,
        parts=1,
        segments=(),
        steps=(step,),
    )
    assert (right(asked), right(replace(asked, metadata_json=None)), short(asked)) == (
        1.0,
        None,
        0.5,
    )
