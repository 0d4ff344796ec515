"""Text of records. Pure."""

from __future__ import annotations


def encodable(text: str, chars: int) -> str:
    """Return the first `chars` characters as text that UTF-8 can encode.

    A lone surrogate, as json.loads gives it for a broken escape, becomes its escape.
    """
    return text[:chars].encode("utf-8", "backslashreplace").decode()[:chars]
