"""Thoughts of a model that stand in its text, in tags such as <think>. Pure."""

from __future__ import annotations

import re

_TAG = "(?:think|thinking|thought|reasoning)"
_THOUGHT_TAG = re.compile(f"</?{_TAG}>")
_THOUGHT = re.compile(
    rf"\A(?:(?!<{_TAG}>).)*?</{_TAG}>|<(?P<tag>{_TAG})>(?:.*?</(?P=tag)>|.*)", re.DOTALL
)
"""A thought that the prompt has opened, or one in tags, closed or not."""


def without_thoughts(text: str) -> str:
    """Return the words of a reply without its thoughts in tags such as <think>.

    A thought that is not closed ends with the text; one that the prompt has opened begins with it.
    """
    return _THOUGHT.sub("", text) if _THOUGHT_TAG.search(text) else text
