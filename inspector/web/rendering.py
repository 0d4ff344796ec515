"""Render templates: everything is escaped, times are UTC, numbers are short."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from fastapi import Request, Response
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined


def _number(value: Any, digits: int = 3) -> str:
    """Format a number with thousands separators; an absent one is a dash."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.{digits}f}".rstrip("0").rstrip(".") if abs(value) < 1e15 else f"{value:g}"


def _time(value: datetime | None, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    return "–" if value is None else value.strftime(form)


def link(path: str, **query: Any) -> str:
    """Return an address with the parameters that are not None."""
    given = {name: value for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(given, safe=':')}" if given else path


def _age(seconds: float | None) -> str:
    """Format a length of time with one unit."""
    if seconds is None:
        return "–"
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _size(count: int | None) -> str:
    """Format a number of bytes with a binary unit."""
    if count is None:
        return "–"
    power = min(4, max(0, count.bit_length() - 1) // 10)
    return f"{_number(count / (1 << 10 * power), 1)} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {"number": _number, "time": _time, "age": _age, "size": _size}
_TEMPLATES.globals["link"] = link


def text_of(template: str, **values: Any) -> str:
    """Return a rendered template. A lone surrogate, which UTF-8 lacks, becomes a question mark."""
    text = _TEMPLATES.get_template(template).render(**values)
    return text.encode("utf-8", "replace").decode()


def block_of(template: str, block: str, **values: Any) -> str:
    """Return one rendered block of a template, as `text_of` does."""
    found = _TEMPLATES.get_template(template)
    text = "".join(found.blocks[block](found.new_context(values)))
    return text.encode("utf-8", "replace").decode()


def render(request: Request, template: str, status: int = 200, **values: Any) -> Response:
    """Return a page. Its theme is the reader's choice, or that of the system."""
    theme = request.cookies.get("theme", "auto")
    here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    shown = theme if theme in ("light", "dark") else "auto"
    stale = request.app.state.parts.lake.failed
    text = text_of(template, theme=shown, here=here, stale=stale, **values)
    return HTMLResponse(text, status)
