"""Built-in quality rules: one small pure file each, one line here. A name in the settings is a key of this table, with a version."""

from __future__ import annotations

from collections.abc import Mapping

from rewards.quality.drift import drift
from rewards.quality.length import length
from rewards.quality.repetition import repetition
from rewards.quality.retried import retried
from rewards.quality.score import QualityRule
from rewards.quality.token_capture import tokens
from rewards.quality.truncation import truncation
from rewards.quality.well_formed import format

BUILT_IN: Mapping[str, QualityRule] = {
    "length": length,
    "repetition": repetition,
    "truncation": truncation,
    "format": format,
    "tokens": tokens,
    "drift": drift,
    "retried": retried,
}
