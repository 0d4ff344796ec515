"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny language model with random weights."""
    from clawstream.demo.model import make_random_model  # torch and transformers: 10 s

    return make_random_model(tmp_path_factory.mktemp("model") / "m")
