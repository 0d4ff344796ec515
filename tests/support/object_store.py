"""S3Proxy, an S3-compatible object store, as a process whose bucket is a directory on disk."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from support.ports import free_port
from support.processes import ROOT, until

from clawstream.runtime.broker.jars import ensure_jars, find_java, parse_pins
from clawstream.runtime.broker.jvm import Jvm

BUCKET, KEY, SECRET, REGION = "clawstream", "a-key", "a-secret", "us-east-1"
PROPERTIES = {
    "s3proxy.authorization": "aws-v2-or-v4",
    "s3proxy.identity": KEY,
    "s3proxy.credential": SECRET,
    "s3proxy.v4-max-non-chunked-request-size": 128 << 20,
    "jclouds.provider": "filesystem-nio2",
}


class ObjectStore:
    """An object store with one bucket. directory: of the objects, which survive a kill.

    Attributes:
        endpoint: its URL, which stays after a restart.
    """

    def __init__(self, directory: Path) -> None:
        self._objects = directory / "objects"
        (self._objects / BUCKET).mkdir(parents=True)
        self._properties, self._log = directory / "s3proxy.conf", directory / "s3proxy.log"
        self._port = free_port()
        self.endpoint = f"http://127.0.0.1:{self._port}"
        own = {"s3proxy.endpoint": self.endpoint, "jclouds.filesystem.basedir": self._objects}
        lines = (f"{name}={value}" for name, value in {**PROPERTIES, **own}.items())
        self._properties.write_text("\n".join(lines))
        pins = parse_pins((ROOT / "requirements" / "s3proxy.txt").read_text())
        jars = ensure_jars(ROOT / ".cache" / "s3proxy", pins)
        self._command = [
            find_java().executable, "-Xmx256m", "-XX:TieredStopAtLevel=1", "-cp", f"{jars}/*",
            "org.gaul.s3proxy.Main", "--properties", str(self._properties),
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        """Start the process; return when it accepts connections."""
        self._process = Jvm(self._command, self._log, parent_death_signal=signal.SIGKILL)
        until(self._accepts)

    def kill(self) -> None:
        """End the process by SIGKILL."""
        self._process.end(0.0)

    def objects(self, prefix: str) -> dict[str, int]:
        """Return the objects below a prefix: name relative to it, to size in bytes."""
        root = self._objects / BUCKET / prefix
        files = (path for path in root.rglob("*") if path.is_file())
        return {str(path.relative_to(root)): path.stat().st_size for path in files}

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables with endpoint and login."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": REGION,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }

    @property
    def lake_options(self) -> dict[str, str]:
        """Return `lake.storage_options`; the login is in the environment."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": REGION,
        }

    def _accepts(self) -> bool:
        assert self._process.exit_code is None, self._log.read_text()
        try:
            socket.create_connection(("127.0.0.1", self._port), 1).close()
        except OSError:
            return False
        return True


@contextmanager
def object_store(directory: Path) -> Iterator[ObjectStore]:
    """Run an object store; end it with the block."""
    store = ObjectStore(directory)
    try:
        yield store
    finally:
        store.kill()
