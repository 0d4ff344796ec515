"""`clawstream traces`: spans of calls, trajectories, batches and versions, derived from the topics.

No other process emits spans, so calls and jobs do no extra work, and nothing is lost while a
collector is away. The protocol:

1. Read the topics from the offsets that the consumer group has committed. A group that has none
   commits its start, an hour back, before it reads. A topic that appears later is read whole.
2. Derive spans from each record alone (`calls`, `pipeline`); only a weight version looks up the
   batches that it names. Ids are hashes of the ids in the records, and times are the records'.
3. Export them. While the collector does not take them, try again and read nothing more.
4. Then commit the offsets. After a crash the spans since the last commit are exported again; they
   are equal, id by id.

Spans are a view, not data: if retention removes records that were not exported yet, their spans
are lost, which the process logs.
"""
