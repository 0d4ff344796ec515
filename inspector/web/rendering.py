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


def _link(path: str, **query: Any) -> str:
    """Return an address with the parameters that are not None."""
    given = {name: value for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {"number": _number, "time": _time}
_TEMPLATES.globals["link"] = _link


def text_of(template: str, **values: Any) -> str:
    """Return a rendered template. A lone surrogate, which UTF-8 lacks, becomes a question mark."""
    text = _TEMPLATES.get_template(template).render(**values)
    return text.encode("utf-8", "replace").decode()


def render(request: Request, template: str, status: int = 200, **values: Any) -> Response:
    """Return a page. Its theme is the reader's choice, or that of the system."""
    theme = request.cookies.get("theme", "auto")
    here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    shown = theme if theme in ("light", "dark") else "auto"
    return HTMLResponse(text_of(template, theme=shown, here=here, **values), status)
