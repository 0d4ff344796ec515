"""A stalled consumer on a real Kafka is named, with its remedy."""

from __future__ import annotations

from typing import Any

import httpx
import psutil
from support.jobs import session
from support.ports import free_port
from support.up import call, up

from clawstream.runtime.kafka import Cluster
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.settings import Settings


def scraped(port: int) -> str:
    return httpx.get(f"http://127.0.0.1:{port}/metrics").text


def test_a_suspended_job_is_named_by_status_and_monitor(
    settings: Settings, cluster: Cluster
) -> None:
    tree: dict[str, Any] = settings.model_dump()
    first = free_port()
    tree |= {"run_id": "run", "up": {"processes": ("assemble", "monitor")}}
    tree |= {"metrics": {"port": first}}
    settings = Settings.model_validate(tree)
    steps, here = settings.kafka.topics.steps, f"data_dir={settings.data_dir}"
    group = f"{settings.kafka.topic_prefix}-assemble"
    with up(settings) as started:
        started.until(lambda: started.table.get("assemble", {}).get("ready"), "assemble is ready")
        started.until(lambda: cluster.committed(group), "assemble has committed")
        assert "clawstream_job_partitions 4.0" in scraped(first + 1)
        job = psutil.Process(started.table["assemble"]["pid"])
        job.suspend()
        producer = cluster.producer()
        producer.put(steps, b"k", Codec().encode(session("k", "opened")))
        producer.flush()
        started.alone("watch", "status", "--watch")
        status = call("status", here)
        named = f": {group} does not read {steps}"
        assert (status.returncode, named in status.stdout) == (1, True), status
        assert f"kill -CONT {job.pid}" in status.stdout
        started.until(lambda: named in started.log("watch"), "status --watch shows it")
        labels = f'consumergroup="{group}",status="%s",topic="{steps}"'
        stalled = f"clawstream_consumergroup_status{{{labels}}} 1"
        started.until(
            lambda: any(stalled % s in scraped(first) for s in ("stopped", "stalled")),
            "the monitor shows it",
        )
        problem = f'clawstream_problem{{kind="consumer",subject="{group} {steps}"}} 1.0'
        assert problem in scraped(first)
        assert f'kafka_consumergroup_lag{{consumergroup="{group}"' in scraped(first)
        assert 'clawstream_process_up{process="assemble"} 1.0' in scraped(first)
        job.resume()
        started.stop()
