"""What a browser would run of a page."""

from __future__ import annotations

from html.parser import HTMLParser


class Tags(HTMLParser):
    """The tags of a page with the names of their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, list[str]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, [name for name, _ in attrs]))


def unsafe(text: str) -> list[str]:
    """Return what could run code on a page: tags, and attributes of any tag."""
    found = Tags(text).found
    tags = [tag for tag, _ in found if tag in ("img", "style", "iframe", "object")]
    scripts = [tag for tag, names in found if tag == "script" and "src" not in names]
    attributes = [n for _, names in found for n in names if n == "style" or n.startswith("on")]
    return tags + scripts + attributes
