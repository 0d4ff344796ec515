"""Java's archives of loaded classes (class data sharing), which halve the CPU time of a start.

The packaged Java comes without an archive of its own classes: `make_base_archive` writes it once,
beside Java. On top of it the first broker that stops writes an archive of all classes that it has
loaded, beside Kafka's jars. Java does this by itself, checks the file at each start (build, class
path, checksum), and writes another one in place of a file that it does not accept.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from hashlib import sha256
from pathlib import Path

from clawstream.runtime.broker.jars import Java
from clawstream.runtime.logs import logger

_DUMP_TIMEOUT_S = 120.0
_WRITES_ARCHIVES = 19
"""The first Java that writes an archive by itself when it exits."""


def make_base_archive(java: Java) -> None:
    """Write the archive of Java's own classes if there is none; costs a second of CPU time.

    The file appears complete or not at all. Without permission to write it starts stay slow.
    """
    path = Path(java.executable).parents[1] / "lib" / "server" / "classes.jsa"
    if path.exists() or not os.access(path.parent, os.W_OK):
        return
    try:
        with tempfile.TemporaryDirectory(prefix=".classes-", dir=path.parent) as directory:
            draft = Path(directory) / path.name
            subprocess.run(
                [
                    java.executable,
                    "-XX:+UseSerialGC",
                    *java.quiet_options,
                    "-Xshare:dump",
                    f"-XX:SharedArchiveFile={draft}",
                ],
                check=True,
                capture_output=True,
                timeout=_DUMP_TIMEOUT_S,
            )
            draft.replace(path)
    except (OSError, subprocess.SubprocessError) as error:
        logger().warning("class_archive_not_made", error=str(error))


def archive_options(java: Java, jars_dir: Path, *, may_write: bool) -> list[str]:
    """Return the JVM options that use the archive of Kafka's classes.

    Args:
        java: The Java to run. Each Java has an archive of its own.
        jars_dir: Kafka's jars.
        may_write: Whether the JVM writes the archive at its end if there is no valid one.
    """
    if java.version < _WRITES_ARCHIVES:
        return []
    key = sha256(java.executable.encode()).hexdigest()[:8]
    return [
        # A file that does not fit is no problem of the user's.
        "-Xlog:cds=off",
        "-Xlog:aot=off",
        "-XX:+VerifySharedSpaces",
        f"-XX:SharedArchiveFile={jars_dir / f'classes-java{java.version}-{key}.jsa'}",
        *(["-XX:+AutoCreateSharedArchive"] if may_write else []),
    ]
