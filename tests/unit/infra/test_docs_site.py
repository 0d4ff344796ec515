"""The command that writes the pages of the documentation site."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[3] / "infra" / "docs" / "pages.py"


@pytest.mark.parametrize("name", ["", "docs", "infra/docs"])
def test_only_a_folder_that_the_command_wrote_is_replaced(tmp_path: Path, name: str) -> None:
    copy = tmp_path / "infra" / "docs" / "pages.py"
    copy.parent.mkdir(parents=True)
    copy.write_text(PAGES.read_text())
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text("kept")
    with pytest.raises(SystemExit, match="name another"):
        runpy.run_path(str(copy))["main"](tmp_path / name)
    assert page.exists() and copy.exists()
