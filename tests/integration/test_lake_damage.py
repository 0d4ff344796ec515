"""The lake writer as a process, while one of its tables is damaged and repaired."""

from __future__ import annotations

from pathlib import Path

from support.lake import Eventually, a_reward, a_step, column, put_steps, running

from clawstream.ops.lag import data_lag
from clawstream.runtime.kafka import Cluster
from clawstream.runtime.topics.records import create_topics
from clawstream.schemas import records
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.lake.delta.repair import repair
from clawstream.stream_jobs.lake.delta.table import open_table, sizes


def test_one_damaged_table_is_left_out_repaired_and_read_again(
    settings: Settings, cluster: Cluster, eventually: Eventually
) -> None:
    create_topics(cluster, settings)
    codec, producer, topics = Codec(), cluster.producer(), settings.kafka.topics
    group, steps = f"{settings.kafka.topic_prefix}-lake", Path(settings.lake_uri) / "steps"

    def put(first: int, last: int) -> None:
        put_steps(producer, settings, range(first, last))
        for n in range(first, last):
            opened = records.SessionEvent(
                event_id=f"e{n}",
                run_id="r",
                trajectory_key=f"k{n % 17}",
                kind="opened",
                created_at=n,
            )
            producer.put(topics.steps, opened.trajectory_key.encode(), codec.encode(opened))
            producer.put(topics.rewards, b"k", codec.encode(a_reward(n)))
        producer.flush()

    def others_have(count: int) -> bool:
        return {
            len(column(settings, *of))
            for of in (("session_events", "event_id"), ("rewards", "event_id"))
        } == {count}

    with running(settings) as processes:
        writer = processes.write(flush_interval_s=0.05, flush_rows=40)
        put(0, 200)
        eventually(lambda: others_have(200) and len(column(settings, "steps", "step_id")) == 200)
        writer.kill()
        writer.wait()
        last = max((steps / "_delta_log").glob("*.json"))
        last.write_bytes(last.read_bytes()[:100])

        writer = processes.write(flush_interval_s=0.05, flush_rows=40)
        put(200, 300)
        eventually(lambda: others_have(300))
        assert f"_delta_log/{last.name} can't be read" in processes.log("lake")
        assert data_lag(cluster, settings, group) >= 100, "what the damaged table lacks"

        repair(settings, "steps", cluster)
        eventually(lambda: len(column(settings, "steps", "step_id")) == 300)
        eventually(lambda: data_lag(cluster, settings, group) == 0)

        (steps / next(iter(sizes(open_table(settings.lake_uri, "steps", {}))))).unlink()
        assert repair(settings, "steps", cluster).rows > 0
        put(300, 310)
        eventually(lambda: others_have(310) and len(column(settings, "steps", "step_id")) == 310)
        assert sorted(column(settings, "steps", "step_id")) == sorted(
            a_step(n).step_id for n in range(310)
        )
        assert processes.stop(writer) == 0
    producer.close()
