"""Write a file of encoded records to Kafka at full speed, in a process that is not measured.

python -m benchmarks.jobs.feeder FILE BOOTSTRAP_SERVERS TOPIC_PREFIX
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from clawstream.runtime.kafka import Cluster
from clawstream.schemas.topics import Topics

HEAD = struct.Struct("<?HI")
"""Before each record of a file: whether it is a reward, length of key and of value."""
FLUSH_EVERY = 2000


def read(path: Path) -> Iterator[tuple[bool, bytes, bytes]]:
    """Yield each record of a file: whether it is a reward, key, value."""
    with path.open("rb") as file:
        while head := file.read(HEAD.size):
            reward, key, value = HEAD.unpack(head)
            yield reward, file.read(key), file.read(value)


def feed(path: Path, bootstrap_servers: str, prefix: str) -> None:
    """Write a file to its topics; returns once everything is acknowledged."""
    topics, producer = Topics(prefix), Cluster(bootstrap_servers).producer(linger_ms=10)
    for at, (reward, key, value) in enumerate(read(path), 1):
        producer.put(topics.rewards if reward else topics.steps, key, value)
        if at % FLUSH_EVERY == 0:
            producer.flush()
    producer.flush()


if __name__ == "__main__":
    feed(Path(sys.argv[1]), *sys.argv[2:])
