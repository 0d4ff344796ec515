"""`clawstream jobs assemble`: a worker of assemble.

The protocol of assemble, for each partition (`stream_jobs.assemble.partition`; the fold is `stream_jobs.assemble.fold`, the state log
`stream_jobs.assemble.changelog`). A process may be killed between any two lines; after each point it is said what makes that good:

1. A new owner appends a marker to its partition of `claw.assembly`; the marker's offset is its epoch. It reads that log up to there
   (what has a lower epoch than a record before it is a fenced writer's), checks the positions against today's topics, refills its
   payload cache, sends again what was decided but not done, and seeks Faust to its own `applied` + 1: Kafka's commits are advice.
   Killed: the next owner does the same; a marker more does no harm.
2. A batch is folded in offset order; offsets at or below `applied` fold to nothing. A record that can't be decoded or folded has no
   effect but a dead letter, which is a decision like any other. Killed: nothing was durable, the records come again.
3. One delta record holds the state's change and the decisions. It is awaited, and must land right behind the owner's last record;
   else another worker owns the partition, and this one dies before any output. Killed behind it: the next owner's point 1 sends.
4. The outputs are awaited: payload, marks and dead letters first, then candidates with the payload's place in their headers. Their bytes
   depend on the decision alone, so sending one again gives the same bytes. That they are done rides in the next delta. Killed: the
   next owner sends them again; who reads them knows them by their ids.
5. Once a second Kafka is told how far the batches came. Killed: what comes again is dropped by `applied`. A snapshot when the log has
   grown, then it is trimmed. Killed between its pieces, or before the trim: it counts when it is whole; until then what is before it does.
6. Any other exception: the process ends (`runtime.process.lifecycle.die`), which is being killed.
"""

from __future__ import annotations

from functools import partial

from runtime.process.lifecycle import run_async
from schemas.settings import Settings
from stream_jobs.assemble.job import Assembler
from stream_jobs.worker.shell import serve


def main(settings: Settings) -> None:
    """Run a worker of assemble until SIGTERM. Never returns."""
    run_async("assemble", settings, partial(serve, group="assemble", make=Assembler))
