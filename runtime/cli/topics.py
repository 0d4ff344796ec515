"""`clawstream topics`."""

from __future__ import annotations

import typer

from runtime.cli.words import Config, Words, cluster_of, group, plain_errors, settings_of

app = group("Kafka topics.")


@app.command("create")
def topics_create(words: Words = None, config: Config = None) -> None:
    """Make every topic that is not there yet, and announce the schemas."""
    settings = settings_of(config, words)
    from runtime.records import create_topics

    with plain_errors():
        made = create_topics(cluster_of(settings), settings)
    typer.echo("\n".join(f"made {name}" for name in made) or "all topics are there")


@app.command("list")
def topics_list(words: Words = None, config: Config = None) -> None:
    """Topics with their ids, partitions and offsets."""
    settings = settings_of(config, words)
    with plain_errors():
        cluster = cluster_of(settings)
        mine = sorted(t for t in cluster.topics() if t.startswith(settings.kafka.topic_prefix + "."))
        ids = cluster.topic_ids(mine)
        for name in mine:
            marks = cluster.watermarks(name)
            kept = sum(high - low for low, high in marks.values())
            typer.echo(f"{name:48} {ids[name]:24} partitions {len(marks):3}  records {kept}")
