"""Provide fixtures on real parts: one Kafka for the session, a new topic prefix for every test."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import pytest
import uvloop
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from support.patience import PATIENCE_S, until
from support.ports import free_port

from clawstream.runtime.broker.embedded import EmbeddedBroker
from clawstream.runtime.kafka import Cluster
from clawstream.schemas.settings import Settings

T = TypeVar("T")
# A busy machine makes a test slow, not wrong, so there is no deadline. Every run tries the same
# examples, so that a change is tested by its effect and not by chance. To search for new examples:
# `pytest --hypothesis-profile=searching`.
hypothesis_settings.register_profile(
    "searching", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis_settings.register_profile(
    "unhurried",
    hypothesis_settings.get_profile("searching"),
    derandomize=True,
    max_examples=25,
)
hypothesis_settings.load_profile("unhurried")


def pytest_configure() -> None:
    """Let children end by Ctrl-C, also where a shell ran the tests in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Exempt modules and collected tests from garbage collection.

    They live until the end, and a full collection over them takes half a second of CPU.
    """
    gc.freeze()


@pytest.fixture(
    params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"]
)
def each_event_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test on both event loops: the gateway uses uvloop, tests and demos asyncio's own loop.

    The two differ in how they write, pause and disconnect.
    """
    asyncio.set_event_loop_policy(request.param())
    yield
    asyncio.set_event_loop_policy(None)


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the bootstrap servers of a real Apache Kafka that runs for the test session."""
    with EmbeddedBroker(tmp_path_factory.mktemp("kafka"), free_port()) as broker:
        yield broker.bootstrap_servers


@pytest.fixture
def settings(kafka: str, tmp_path: Path) -> Settings:
    """Return settings of a new installation: another topic prefix, another data directory."""
    return Settings.model_validate(
        {
            "data_dir": tmp_path,
            "kafka": {
                "bootstrap_servers": kafka,
                "topic_prefix": f"t{uuid4().hex[:10]}",
                "partitions": 4,
            },
        }
    )


@pytest.fixture
def cluster(settings: Settings) -> Cluster:
    """Return the cluster of `settings`."""
    return Cluster(settings.bootstrap_servers)


@pytest.fixture
def eventually() -> Callable[..., object]:
    """Return `eventually(condition, timeout_s)`, which polls until the condition is true.

    It returns the condition's value, and fails at the deadline.
    """

    def poll(condition: Callable[[], T], timeout_s: float = PATIENCE_S) -> T:
        return until(condition, seconds=timeout_s)

    return poll


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Use one torch thread: bit-for-bit repeatable. For a module, as `usefixtures`."""
    import torch  # as for `model_dir`: not for every test

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny language model with random weights."""
    from clawstream.demo.model import make_random_model  # torch and transformers: 10 s

    return make_random_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="session")
def bubblewrap() -> None:
    """Skip a test where the sandbox of code tests does not work."""
    from clawstream.rewards.code.sandbox import Limits, Sandbox, SandboxError

    try:
        Sandbox(Limits(memory_mb=128, processes=8))
    except SandboxError as e:
        pytest.skip(str(e))
