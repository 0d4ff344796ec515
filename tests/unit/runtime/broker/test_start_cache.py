"""Test the start cache: its name, and that a failed build leaves no file. Runs no real Java."""

import fcntl
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from clawstream.runtime.broker import start_cache as broker_cache
from clawstream.runtime.broker.jars import Java, java_build
from clawstream.runtime.broker.jvm import BrokerError
from clawstream.runtime.broker.start_cache import StartCacheError, make_start_cache, start_cache


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture
def java(tmp_path: Path) -> Callable[[str], Java]:
    """Return a function that creates a fake Java from lines of shell."""

    def write(script: str) -> Java:
        path = tmp_path / "java"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return Java(str(path), 25, "some build")

    return write


def test_it_is_named_by_all_that_it_depends_on(tmp_path: Path) -> None:
    names = {start_cache(Java("java", 25, "a"), tmp_path).path.name}
    names.add(start_cache(Java("java", 25, "b"), tmp_path).path.name)
    names.add(start_cache(Java("java", 21, "a"), tmp_path).path.name)
    names.add(start_cache(Java("/opt/java", 25, "a"), tmp_path).path.name)
    (tmp_path / ".verified").write_text('{"a.jar": ["00", 1, 2]}')
    names.add(start_cache(Java("java", 25, "a"), tmp_path).path.name)
    # The same bytes, written at another time.
    (tmp_path / ".verified").write_text('{"a.jar": ["00", 1, 3]}')
    names.add(start_cache(Java("java", 25, "a"), tmp_path).path.name)
    assert len(names) == 6
    assert start_cache(Java("java", 25, "a"), tmp_path).path.name in names


@pytest.mark.parametrize(
    ("version", "option"), [(17, "-XX:SharedArchiveFile="), (25, "-XX:AOTCache=")]
)
def test_a_start_is_told_of_one_that_is_there(tmp_path: Path, version: int, option: str) -> None:
    cache = start_cache(Java("java", version), tmp_path)
    assert cache.options == []
    cache.path.write_bytes(b"classes")
    assert f"{option}{cache.path}" in cache.options
    cache.discard("it is bad")
    assert cache.options == []


def test_a_bad_one_that_may_not_be_deleted_is_passed_over(tmp_path: Path) -> None:
    cache = start_cache(Java("java", 25), tmp_path)
    cache.path.mkdir()  # a directory cannot be deleted as a file, even by root
    assert cache.options
    cache.discard("it is bad")
    assert cache.made and cache.options == []


def test_each_java_of_a_making_has_the_lowest_priority(
    tmp_path: Path, java: Callable[[str], Java]
) -> None:
    asked_by_all = java(
        'nice >> $0.nice; case "$*" in *StorageTool*) for a; do case $a in *formatting.properties) '
        'mkdir "${a%.properties}";; esac; done;; esac; exit 1'
    )
    cache = start_cache(asked_by_all, tmp_path / "jars")
    # First the format; then the check of the existing cache, and the format again.
    for made in (False, True):
        (tmp_path / "jars").mkdir(exist_ok=True)
        if made:
            cache.path.write_bytes(b"classes")
        with pytest.raises(BrokerError):
            make_start_cache(cache, niceness=19)
    assert (tmp_path / "java.nice").read_text().split() == ["19"] * 3


def test_a_making_that_fails_says_why_and_leaves_nothing(
    tmp_path: Path, java: Callable[[str], Java]
) -> None:
    jars = tmp_path / "jars"
    (jars / ".training-killed").mkdir(parents=True)
    cache = start_cache(java("echo no such class; exit 1"), jars)
    with pytest.raises(BrokerError, match="no such class"):
        make_start_cache(cache)
    assert [path.name for path in jars.iterdir()] == [".start-cache.lock"]


def test_none_is_made_on_a_disk_that_is_nearly_full(
    tmp_path: Path, java: Callable[[str], Java], monkeypatch: pytest.MonkeyPatch
) -> None:
    nearly_full = Usage(1 << 40, (1 << 40) - 1, broker_cache.NEEDED_BYTES - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: nearly_full)
    with pytest.raises(StartCacheError, match="1024 MiB free"):
        make_start_cache(start_cache(java("touch $0.ran"), tmp_path))
    assert not (tmp_path / "java.ran").exists()


def test_one_process_makes_it(tmp_path: Path, java: Callable[[str], Java]) -> None:
    cache = start_cache(java("echo $* > $0.ran"), tmp_path)
    with (tmp_path / ".start-cache.lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert not make_start_cache(cache)
    assert not (tmp_path / "java.ran").exists()
    cache.path.write_bytes(b"classes")
    # Another process made it; Java was only asked whether it accepts the cache.
    assert make_start_cache(cache)
    assert (tmp_path / "java.ran").read_text().endswith("-version\n")
    assert cache.path.read_bytes() == b"classes"


def test_a_build_of_java_is_told_from_others() -> None:
    told = (
        "Property settings:\n    java.home = /opt/java\n    java.vm.vendor = V\n"
        "    java.vm.name = N\n    user.name = me\n"
    )
    assert java_build(told + "    java.vm.version = 17.0.1+2\n") == "/opt/java V N 17.0.1+2"


def test_a_training_run_takes_another_port_where_one_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = random.sample(broker_cache._PORTS, 50)
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        monkeypatch.setattr(random, "sample", lambda *_: [busy.getsockname()[1], *others])
        assert broker_cache._free_port() in others
