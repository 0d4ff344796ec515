"""Test the archive options of a JVM, and the making of the base archive. Runs no real Java."""

from collections.abc import Callable
from pathlib import Path

import pytest

from clawstream.runtime.broker.class_archive import archive_options, make_base_archive
from clawstream.runtime.broker.jars import Java

WRITES = 'for a; do case $a in -XX:SharedArchiveFile=*) echo classes > "${a#*=}";; esac; done'


@pytest.fixture
def java(tmp_path: Path) -> Callable[[str], Java]:
    """Return a function that creates a fake Java from a line of shell."""

    def write(script: str) -> Java:
        path = tmp_path / "bin" / "java"
        path.parent.mkdir()
        (tmp_path / "lib" / "server").mkdir(parents=True)
        path.write_text(f"#!/bin/sh\necho ran >> $0.ran\n{script}\n")
        path.chmod(0o755)
        return Java(str(path), 25)

    return write


def test_the_base_archive_is_made_once(tmp_path: Path, java: Callable[[str], Java]) -> None:
    fake = java(WRITES)
    make_base_archive(fake)
    make_base_archive(fake)
    assert {p.name: p.read_text() for p in (tmp_path / "lib" / "server").iterdir()} == {
        "classes.jsa": "classes\n"
    }
    assert (tmp_path / "bin" / "java.ran").read_text() == "ran\n"


@pytest.mark.parametrize("script", [f"{WRITES}; exit 1", "exit 0"])
def test_a_base_archive_that_cannot_be_made_leaves_nothing(
    tmp_path: Path, java: Callable[[str], Java], script: str
) -> None:
    make_base_archive(java(script))
    assert list((tmp_path / "lib" / "server").iterdir()) == []


def test_a_java_without_its_usual_folders_is_left_alone(tmp_path: Path) -> None:
    make_base_archive(Java(str(tmp_path / "bin" / "java"), 25))
    assert list(tmp_path.iterdir()) == []


def test_each_java_has_an_archive_of_its_own_and_only_brokers_write_it(tmp_path: Path) -> None:
    writes = "-XX:+AutoCreateSharedArchive"
    broker = archive_options(Java("/a/bin/java", 25), tmp_path, may_write=True)
    tool = archive_options(Java("/a/bin/java", 25), tmp_path, may_write=False)
    assert set(broker) - set(tool) == {writes}
    assert archive_options(Java("/b/bin/java", 25), tmp_path, may_write=True) != broker
    assert archive_options(Java("/a/bin/java", 21), tmp_path, may_write=True) != broker
    assert archive_options(Java("/a/bin/java", 17), tmp_path, may_write=True) == []
