"""Run `clawstream jobs assemble`: a worker of assemble.

The processing protocol of each partition (`clawstream.stream_jobs.assemble.partition`; the fold is
`clawstream.stream_jobs.assemble.fold`, the changelog is
`clawstream.stream_jobs.assemble.changelog`). A process may be killed between any two steps; each
step states how the next owner recovers.

1. A new owner appends a marker to its partition of `claw.assembly`; the marker's offset is its
  epoch. It reads the changelog up to the marker and ignores records of lower epochs (they belong
  to fenced writers). It checks its positions against the current topics, refills its payload
  cache, sends outputs that were decided but not acknowledged, and seeks Faust to its own
  `applied` + 1. Offsets committed to Kafka are not used. After a kill: the next owner repeats
  this step; an extra marker is harmless.
2. A batch is folded in offset order; records at or below `applied` have no effect. A record that
  cannot be decoded or folded only produces a dead letter. After a kill: nothing was durable, so
  the records are read again.
3. One delta record holds the state changes and the decisions. Its acknowledgement is awaited,
  and it must directly follow the owner's last record; otherwise another worker owns the
  partition, and this worker ends before it writes any output. After a kill: the next owner sends
  the outputs in step 1.
4. The outputs are sent and awaited: payload, marks and dead letters first, then candidates with
  the location of the payload in their headers. Output bytes depend only on the decision, so a
  second send has the same bytes. The next delta records that the outputs are acknowledged. After
  a kill: the next owner sends them again, and readers drop duplicates by id.
5. Once a second the offsets of finished batches are committed to Kafka. When the changelog has
  grown, a snapshot is appended and the changelog is trimmed. After a kill: `applied` drops
  redelivered records; a snapshot counts only when all of its chunks are there.
6. Any other exception ends the process (`clawstream.runtime.process.lifecycle.die`), which has the
same
  effect as a kill.
"""

from __future__ import annotations

from functools import partial

from clawstream.runtime.process.lifecycle import run_async
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.assemble.job import Assembler
from clawstream.stream_jobs.worker.shell import serve


def main(settings: Settings) -> None:
    """Run a worker of assemble until SIGTERM. Never returns."""
    run_async("assemble", settings, partial(serve, group="assemble", make=Assembler))
