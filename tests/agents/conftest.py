"""Install the real agents once, and run one real Clawstream installation for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.agents import install
from support.stage import Stage, stage_in


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Provide Kafka, gateway, assemble and lake, with the agents installed."""
    install()
    with stage_in(tmp_path_factory.mktemp("stage")) as made:
        yield made
