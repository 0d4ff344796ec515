"""Test the download of Kafka's jars: pins, verification, repair, concurrency.

The fetch is injected; no test uses a network.
"""

import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from clawstream.runtime.broker.jars import (
    JarsError,
    JavaError,
    PinnedJar,
    ensure_jars,
    find_java,
    java_feature_version,
    parse_pins,
    pinned_jars,
)


def pin(name: str, content: bytes) -> PinnedJar:
    return PinnedJar("org.example", name, "1.0", hashlib.sha256(content).hexdigest(), len(content))


CONTENTS = {"a-1.0.jar": b"first jar", "b-1.0.jar": b"second jar", "c-1.0.jar": b"third jar"}
PINS = tuple(pin(name[0], content) for name, content in CONTENTS.items())


class Repository:
    """Serve `contents` as a Maven repository in memory, and record the requests."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self.contents = contents
        self.asked: list[str] = []
        self._lock = threading.Lock()

    def __call__(self, jar: PinnedJar, directory: Path) -> Path:
        with self._lock:
            self.asked.append(jar.name)
        if jar.name not in self.contents:
            raise RuntimeError(f"{jar.name} not found")
        path = directory / "deep" / jar.name
        path.parent.mkdir(parents=True)
        path.write_bytes(self.contents[jar.name])
        return path


def jars_in(directory: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if not path.name.startswith(".")
    }


def test_committed_pins_are_complete_and_name_no_host() -> None:
    pins = pinned_jars()
    assert len(pins) == 93
    assert len({jar.name for jar in pins}) == 93
    assert all(len(jar.sha256) == 64 and int(jar.sha256, 16) and jar.size > 0 for jar in pins)
    # The broker does not start without these, in the only version that works.
    assert {"kafka_2.13-4.3.1.jar", "log4j-1.2-api-2.25.4.jar", "log4j-core-2.25.4.jar"} <= {
        jar.name for jar in pins
    }


def test_parse_pins_skips_comments_and_blank_lines() -> None:
    assert parse_pins("# why\n\norg.x:y:1.2 " + "0" * 64 + " 7\n") == (
        PinnedJar("org.x", "y", "1.2", "0" * 64, 7),
    )


def test_fetches_once_then_not_again(tmp_path: Path) -> None:
    repository = Repository(CONTENTS)
    assert ensure_jars(tmp_path, PINS, repository) == tmp_path
    assert jars_in(tmp_path) == CONTENTS
    ensure_jars(tmp_path, PINS, repository)
    assert sorted(repository.asked) == sorted(CONTENTS)


@pytest.mark.parametrize("damage", [b"", b"first jaR", b"first jar and more"])
def test_a_corrupted_jar_is_fetched_anew(tmp_path: Path, damage: bytes) -> None:
    ensure_jars(tmp_path, PINS, Repository(CONTENTS))
    (tmp_path / "a-1.0.jar").write_bytes(damage)
    # The file system's clock may not have ticked since the jar was written.
    os.utime(tmp_path / "a-1.0.jar", ns=(0, 0))
    repository = Repository(CONTENTS)
    ensure_jars(tmp_path, PINS, repository)
    assert repository.asked == ["a-1.0.jar"]
    assert jars_in(tmp_path) == CONTENTS


def test_a_lost_or_broken_stamp_costs_a_hash_not_a_download(tmp_path: Path) -> None:
    ensure_jars(tmp_path, PINS, Repository(CONTENTS))
    (tmp_path / ".verified").write_text("not json")
    repository = Repository({})
    ensure_jars(tmp_path, PINS, repository)
    (tmp_path / ".verified").unlink()
    ensure_jars(tmp_path, PINS, repository)
    assert repository.asked == []


def test_jars_that_stay_wrong_are_named_and_never_put_in_place(tmp_path: Path) -> None:
    repository = Repository({"a-1.0.jar": b"first jar", "b-1.0.jar": b"forged jar"})
    with pytest.raises(JarsError) as error:
        ensure_jars(tmp_path, PINS, repository)
    assert "2 of Kafka's jars" in str(error.value)
    assert (
        f"b-1.0.jar: fetched bytes have sha256 {hashlib.sha256(b'forged jar').hexdigest()}"
        in str(error.value)
    )
    assert "c-1.0.jar: c-1.0.jar not found" in str(error.value)
    assert jars_in(tmp_path) == {"a-1.0.jar": b"first jar"}
    assert not list(tmp_path.glob(".staging-*"))
    ensure_jars(tmp_path, PINS, Repository(CONTENTS))
    assert jars_in(tmp_path) == CONTENTS


def test_an_error_names_the_first_jars_only(tmp_path: Path) -> None:
    pins = tuple(pin(f"jar{number:02}", b"content") for number in range(93))
    with pytest.raises(JarsError) as error:
        ensure_jars(tmp_path, pins, Repository({}))
    first, *lines = str(error.value).splitlines()
    assert first.startswith("93 of Kafka's jars could not be put into")
    assert [line.split(":")[0].strip() for line in lines] == [
        "jar00-1.0.jar",
        "jar01-1.0.jar",
        "jar02-1.0.jar",
        "and 90 more",
    ]


def test_a_download_that_fails_once_is_tried_again(tmp_path: Path) -> None:
    repository = Repository(CONTENTS)
    failed: list[str] = []

    def flaky(jar: PinnedJar, directory: Path) -> Path:
        if jar.name not in failed:
            failed.append(jar.name)
            raise ConnectionResetError("connection reset")
        return repository(jar, directory)

    ensure_jars(tmp_path, PINS, flaky)
    assert jars_in(tmp_path) == CONTENTS


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    half = tmp_path / ".staging-killed" / "a-1.0.jar.0"
    half.mkdir(parents=True)
    (half / "a-1.0.jar").write_bytes(b"fir")
    ensure_jars(tmp_path, PINS, Repository(CONTENTS))
    assert not list(tmp_path.glob(".staging-*"))
    assert jars_in(tmp_path) == CONTENTS


def test_two_at_once_fetch_each_jar_once(tmp_path: Path) -> None:
    repository = Repository(CONTENTS)
    with ThreadPoolExecutor(4) as pool:
        assert (
            list(pool.map(lambda _: ensure_jars(tmp_path, PINS, repository), range(4)))
            == [tmp_path] * 4
        )
    assert sorted(repository.asked) == sorted(CONTENTS)


@pytest.mark.parametrize(
    ("settings", "version"),
    [
        ("    java.specification.version = 25\n    java.version = 25.0.2", 25),
        ("java.specification.version = 1.8", 8),
        ("usage: something else", None),
    ],
)
def test_java_feature_version(settings: str, version: int | None) -> None:
    assert java_feature_version(settings) == version


def test_java_is_checked_before_it_is_used(tmp_path: Path) -> None:
    with pytest.raises(JavaError, match=r"broker\.java names '/nowhere/java'"):
        find_java("/nowhere/java")
    old = tmp_path / "java"
    old.write_text("#!/bin/sh\necho 'java.specification.version = 11' >&2\n")
    old.chmod(0o755)
    with pytest.raises(JavaError, match="Java 11; Kafka needs Java 17"):
        find_java(str(old))
    assert find_java().version >= 17
