"""Built-in quality rules: one small pure file each, one line here. A name in the settings is a key of this table, with a version."""

from __future__ import annotations

from collections.abc import Mapping

from quality.drift import drift
from quality.format import format
from quality.length import length
from quality.repetition import repetition
from quality.retried import retried
from quality.score import QualityRule
from quality.tokens import tokens
from quality.truncation import truncation

BUILT_IN: Mapping[str, QualityRule] = {
    "length": length,
    "repetition": repetition,
    "truncation": truncation,
    "format": format,
    "tokens": tokens,
    "drift": drift,
    "retried": retried,
}
