"""Words of commands that are wrong or missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clawstream.cli.main import app


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (("lineage", "run"), "RUN"),
        (("lineage", "step"), "STEP_ID"),
        (("tables", "history"), "TABLE"),
        (("export",), "TARGET"),
        (("keys", "revoke"), "NAME"),
    ],
)
def test_a_setting_is_no_word_of_a_command(
    tmp_path: Path, words: Sequence[str], missing: str
) -> None:
    done = CliRunner().invoke(app, [*words, f"data_dir={tmp_path}"])
    assert (done.exit_code, f"{missing} is missing" in done.output) == (2, True)
