"""The schedule of the learning rate: warm-up, then decay. Pure."""

from __future__ import annotations

import math

from clawstream.schemas.settings import TrainerSettings


def learning_rate(settings: TrainerSettings, sync_index: int) -> float:
    """Return the learning rate of the version after sync_index.

    It rises linearly over lr_warmup_versions, then follows lr_decay to lr_final at max_versions.
    """
    s, at = settings, max(sync_index, 0)
    if at < s.lr_warmup_versions:
        return s.lr * (at + 1) / s.lr_warmup_versions
    if s.lr_decay == "constant" or not s.max_versions:
        return s.lr
    progress = (at - s.lr_warmup_versions) / (s.max_versions - s.lr_warmup_versions)
    done = min(1.0, progress)
    if s.lr_decay == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    return s.lr + (s.lr_final - s.lr) * done
