"""Errors of commands that a user can do something about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clawstream.cli.common_options import plain_errors
from clawstream.cli.main import app
from clawstream.runtime.exit_codes import EXIT_FAILED


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (("lineage", "run"), "NAME"),
        (("lineage", "step"), "NAME"),
        (("export",), "TARGET"),
        (("keys", "revoke"), "NAME"),
    ],
)
def test_a_setting_is_no_word_of_a_command(
    tmp_path: Path, words: Sequence[str], missing: str
) -> None:
    done = CliRunner().invoke(app, [*words, f"data_dir={tmp_path}"])
    assert (done.exit_code, f"{missing} is missing" in done.output) == (2, True)


@pytest.mark.parametrize("run", ["Not/Good", ""])
def test_a_run_that_is_no_id_is_refused(tmp_path: Path, run: str) -> None:
    done = CliRunner().invoke(app, ["policy", "show", "--run", run, f"data_dir={tmp_path}"])
    assert (done.exit_code, "setting run_id" in done.output) == (2, True), done.output


@pytest.mark.parametrize("form", ["{}", "data_dir={}", "{} other"])
def test_inspect_says_that_there_is_no_such_directory(tmp_path: Path, form: str) -> None:
    words = form.format(tmp_path / "dmeo").split()
    done = CliRunner().invoke(app, ["inspect", *words])
    said = "one data directory, not 2" if len(words) > 1 else f"no data directory {tmp_path}/dmeo"
    assert (done.exit_code, said in done.output) == (2, True), done.output


@pytest.mark.parametrize("command", ["compact", "list"])
@pytest.mark.parametrize("tables", [[], ["steps"]])
def test_care_of_tables_says_that_there_is_no_lake(
    tmp_path: Path, command: str, tables: list[str]
) -> None:
    done = CliRunner().invoke(app, ["tables", command, *tables, f"data_dir={tmp_path}"])
    assert (done.exit_code, f"at {tmp_path}/lake" in done.output) == (1, True)


def test_a_full_disk_is_an_error_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end, plain_errors(), Path("/dev/full").open("w") as full:
        full.write("x")
    assert end.value.code == EXIT_FAILED
    assert capsys.readouterr().err == "clawstream: [Errno 28] No space left on device: make room\n"
    with pytest.raises(IsADirectoryError), plain_errors():
        Path("/").write_text("x")
