"""Hold the Markdown pages to their line length, links and paths."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HISTORY = {ROOT / "CHANGELOG.md", ROOT / "docs" / "LOG.md"}
"""Entries of these describe the tree of their day. Their lines and paths are not checked."""
GENERATED = {ROOT / "docs" / "lake-columns.md"}
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")} - HISTORY - GENERATED)
MAX_LINE = 100
FENCE = re.compile(r"^\s*(```|~~~)")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(
    r"`((?:agent_flow|benchmarks|clawstream|demo|docs|examples|gateway|infra|inspector|rewards|rollout|runtime|schemas"
    r"|stream_jobs|tests|trainer)/[\w./-]*)`"
)


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, line) of everything that is not a code block."""
    fenced = False
    for number, line in enumerate(text.splitlines(), start=1):
        if FENCE.match(line):
            fenced = not fenced
        elif not fenced:
            yield number, line


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = (line for _, line in prose(text) if line.startswith("#"))
    names = (re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", h.lstrip("# ")) for h in headings)
    return {re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-") for name in names}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
class TestPage:
    def test_lines_are_short(self, page: Path) -> None:
        """Tables, indented code and lines without a space cannot be broken."""
        long = [
            number
            for number, line in prose(page.read_text())
            if len(line) > MAX_LINE and not line.startswith(("|", "    ")) and " " in line.strip()
        ]
        assert long == []

    def test_relative_links_exist(self, page: Path) -> None:
        text = "\n".join(line for _, line in prose(page.read_text()))
        missing = []
        for target in LINK.findall(text):
            if "://" in target or target.startswith("mailto:"):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            known = file.exists() and (
                not anchor or file.suffix != ".md" or anchor in anchors(file.read_text())
            )
            if not known:
                missing.append(target)
        assert missing == []

    def test_paths_exist(self, page: Path) -> None:
        missing = [path for path in PATH.findall(page.read_text()) if not (ROOT / path).exists()]
        assert missing == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert sorted(page for page in pages if f"]({page}" not in index) == []
