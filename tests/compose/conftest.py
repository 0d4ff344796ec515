"""Build the image, and run containers from it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.containers import INFRA, Containers

FAST = {
    "lake": {"flush_interval_s": 0.5},
    "admit": {"policy": {"group_size": 2, "batch_groups": 1}},
}
"""Settings in which two trajectories are a batch, added to those of the containers."""
Run = Callable[..., Any]


@pytest.fixture(scope="session")
def image() -> None:
    """Build the image of the data part."""
    # Not with compose: without the buildx plugin it builds nothing.
    base = os.environ.get("BASE_IMAGE", "python:3.11-slim-bookworm")
    options = ("--target", "core", "--tag", "clawstream-core", "--build-arg", f"BASE_IMAGE={base}")
    subprocess.run(
        ["docker", "build", "--file", INFRA / "Dockerfile", *options, INFRA.parent], check=True
    )


@pytest.fixture
def run(image: None, tmp_path: Path) -> Run:
    """Return a context manager that runs the containers of a profile with a settings file."""

    @contextmanager
    def run(settings: str, profile: str | None = None) -> Iterator[Containers]:
        tree = yaml.safe_load((INFRA / settings).read_text())
        path = tmp_path / settings
        path.write_text(yaml.safe_dump(FAST | tree))
        containers = Containers(profile, path)
        try:
            containers.up()
            yield containers
        finally:
            containers("logs", "--tail", "20")
            containers("down", "--volumes", "--timeout", "60")

    return run
