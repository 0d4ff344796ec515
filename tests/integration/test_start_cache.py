"""The start cache with a real Java and real brokers: it is used, and a bad one does no harm."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.ports import free_port

from clawstream.runtime.broker.embedded import EmbeddedBroker
from clawstream.runtime.broker.jars import PinnedJar, ensure_jars, find_java
from clawstream.runtime.broker.start_cache import StartCache, make_start_cache, start_cache
from clawstream.runtime.process.child import die_with_parent

PROGRAM = """
import sys
from pathlib import Path
from clawstream.runtime.broker.start_cache import make_start_cache, start_cache
from clawstream.runtime.broker.jars import find_java
make_start_cache(start_cache(find_java(), Path(sys.argv[1])))
"""


@pytest.fixture
def jars_dir(tmp_path: Path) -> Path:
    """Return a separate copy of the jars, so that no other start cache is used."""

    def copy(jar: PinnedJar, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(ensure_jars() / jar.name, directory))

    return ensure_jars(tmp_path / "jars", fetch=copy)


def uses(cache: StartCache, directory: Path) -> bool:
    """Return whether a broker started on the directory has mapped the file."""
    with EmbeddedBroker(directory, free_port(), jars_dir=cache.jars_dir) as broker:
        return str(cache.path) in Path(f"/proc/{broker.pids[1]}/maps").read_text()


@pytest.mark.long
def test_a_start_uses_it_unless_it_is_bad(tmp_path: Path, jars_dir: Path) -> None:
    cache = start_cache(find_java(), jars_dir)
    assert make_start_cache(cache)
    assert not list(jars_dir.glob(".training-*"))
    assert uses(cache, tmp_path / "broker")
    whole = cache.path.read_bytes()
    cache.path.write_bytes(whole[: len(whole) // 2])
    assert not uses(cache, tmp_path / "broker")
    middle = len(whole) // 2
    cache.path.write_bytes(whole[:middle] + bytes(65536) + whole[middle + 65536 :])
    assert not uses(cache, tmp_path / "broker")


def test_a_start_that_crashes_on_it_goes_on_without(tmp_path: Path, jars_dir: Path) -> None:
    java = tmp_path / "java"
    java.write_text(
        '#!/bin/sh\ncase "$*" in *XX:AOTCache*|*SharedArchiveFile*) kill -SEGV $$;; esac\n'
        f'exec {find_java().executable} "$@"\n'
    )
    java.chmod(0o755)
    cache = start_cache(find_java(str(java)), jars_dir)
    for step in ("formatting", "start"):
        cache.path.write_bytes(b"bad")
        with EmbeddedBroker(
            tmp_path / "broker", free_port(), java=str(java), jars_dir=jars_dir
        ) as broker:
            assert broker.pids, step
        assert not cache.made


@pytest.mark.long
def test_a_making_that_is_killed_leaves_nothing_in_the_way(tmp_path: Path, jars_dir: Path) -> None:
    cache = start_cache(find_java(), jars_dir)
    after_s = 0.5
    while True:
        maker = subprocess.Popen(die_with_parent([sys.executable, "-c", PROGRAM, str(jars_dir)]))
        try:
            assert maker.wait(after_s) == 0
            break
        except subprocess.TimeoutExpired:
            maker.send_signal(signal.SIGKILL)
            maker.wait()
        if cache.made:
            break  # the file was complete before its maker ended
        after_s *= 1.5
    assert make_start_cache(cache) and cache.made
    assert not list(jars_dir.glob(".training-*"))
    assert uses(cache, tmp_path / "broker")
