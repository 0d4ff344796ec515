"""`clawstream dlq`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from clawstream.cli.common_options import (
    Config,
    Form,
    Overrides,
    cluster_of,
    fail,
    group,
    instant,
    load,
    settings_of,
)

if TYPE_CHECKING:
    from schemas.settings import Settings

app = group("Dead letters: records that a process could not handle.")

ENTRIES, REDRIVE = "clawstream.ops.dead_letters.entries", "clawstream.ops.dead_letters.redrive"
HEX_BYTES = 256
ASK_ABOVE = 1
"""More records than this are sent only with --yes."""

Topic = Annotated[
    str | None, typer.Option("--topic", help="Where the record was, with or without the prefix.")
]
Process = Annotated[str | None, typer.Option("--process", help="Who could not handle it.")]
Reason = Annotated[
    str | None,
    typer.Option(
        "--reason", help="undecodable, unknown_schema, unknown_target, too_many_rewards, invalid."
    ),
]
Run = Annotated[str | None, typer.Option("--run", help="Run of the record, where it can be told.")]
Since = Annotated[
    str | None,
    typer.Option(
        "--since", help="Dead-lettered since then: 30m, 2h, 3d, or a time like 2026-01-31T12:00."
    ),
]
Every = Annotated[bool, typer.Option("--all", help="All of them.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do it, for however many.")]
Force = Annotated[
    bool,
    typer.Option(
        "--force", help="Also one named by id that was sent before, and what would fail again."
    ),
]
Note = Annotated[str | None, typer.Option("--note", help="Why; kept beside what was done.")]
Ids = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ID]... [a.b=c]...", help="Dead letters, as `list` names them; settings."
    ),
]
Id = Annotated[str, typer.Argument(metavar="ID", help="As `list` names it.")]


def _since(text: str | None) -> int | None:
    """Microseconds since the epoch."""
    at = instant(text, "--since")
    return None if at is None else at * 1000


def _time(micros: int) -> str:
    return datetime.fromtimestamp(micros / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _split(given: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Ids, and settings: only these have an equals sign."""
    return [g for g in given or () if "=" not in g], [g for g in given or () if "=" in g]


# -- looking


@app.command("list")
def dlq_list(
    overrides: Overrides = None,
    config: Config = None,
    topic: Topic = None,
    process: Process = None,
    reason: Reason = None,
    run: Run = None,
    since: Since = None,
    every: Annotated[
        bool, typer.Option("--all/--open", help="Those too that something was done about.")
    ] = False,
    form: Form = "table",
) -> None:
    """The open dead letters, one line each, with how many there are by reason."""
    settings, after = settings_of(config, overrides), _since(since)
    entries = load(ENTRIES)
    found = _read(settings, entries)
    chosen = entries.EntryFilter(topic, process, reason, run, after, every)
    some = [x for x in found.values() if chosen.matches(x, settings.kafka.topics)]
    ambiguous = {n for n, count in Counter(s.short for s in found).items() if count > 1}
    if form == "json":
        typer.echo(json.dumps([_entry_as_dict(x, ambiguous) for x in some], ensure_ascii=False))
        return
    typer.echo(_table(some, ambiguous))
    typer.echo(_summary(some))


def _read(settings: Settings, entries: ModuleType) -> dict[Any, Any]:
    from runtime.topics.records import Decoder

    cluster, topics = cluster_of(settings), settings.kafka.topics
    read: dict[Any, Any] = entries.read_entries(cluster, Decoder(cluster, topics.schemas), topics)
    return read


def _name(entry: Any, ambiguous: set[str]) -> str:
    name: str = (
        entry.record_id.full if entry.record_id.short in ambiguous else entry.record_id.short
    )
    return name


def _entry_as_dict(entry: Any, ambiguous: set[str]) -> dict[str, Any]:
    return {
        "id": _name(entry, ambiguous),
        **entry.record_id._asdict(),
        "state": entry.state,
        "reason": entry.reason,
        "run": entry.run,
        "record": entry.kind,
        "key": entry.key.decode(errors="replace") if entry.key is not None else None,
        "bytes": entry.size,
        "timestamp": _time(entry.timestamp_ms * 1000),
        "occurrences": [
            {
                "process": b.process,
                "reason": b.reason,
                "detail": b.detail,
                "at": b.at,
                "created": _time(b.created_at),
            }
            for b in entry.occurrences
        ],
        "resolutions": [_resolution_as_dict(r) for r in entry.resolutions],
    }


def _resolution_as_dict(done: Any) -> dict[str, Any]:
    sent = (
        f"{done.topic}-{done.sent_partition}-{done.sent_offset}"
        if done.sent_offset is not None
        else None
    )
    return {
        "action": done.action,
        "sent": sent,
        "by": done.by,
        "note": done.note,
        "created": _time(done.created_at),
    }


def _table(entries: Sequence[Any], ambiguous: set[str]) -> str:
    names = ("id", "state", "reason", "process", "run", "record", "since", "detail")
    rows = [
        (
            _name(x, ambiguous),
            x.state,
            x.reason,
            "+".join(dict.fromkeys(b.process for b in x.occurrences)),
            x.run or "-",
            x.kind or "-",
            _time(x.occurrences[0].created_at),
            x.occurrences[0].detail[:60],
        )
        for x in entries
    ]
    widths = [max(len(row[i]) for row in (names, *rows)) for i in range(len(names))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in (names, *rows)
    )


def _summary(entries: Sequence[Any]) -> str:
    states = Counter(x.state for x in entries)
    reasons = Counter(x.reason for x in entries if x.state == "open")
    by_reason = ", ".join(f"{n} {reason}" for reason, n in reasons.most_common())
    done = "".join(f"; {n} {state}" for state, n in states.most_common() if state != "open")
    return f"{states['open']} open{f': {by_reason}' if by_reason else ''}{done}"


def _look(settings: Settings, entries: ModuleType, name: str) -> tuple[Any, Any, Any, str]:
    """The entry of that id, its record, and what the record says; None: why it can't be read."""
    from runtime.topics.records import Decoder
    from schemas.errors import Undecodable, UnknownSchema

    cluster, topics = cluster_of(settings), settings.kafka.topics
    decoder = Decoder(cluster, topics.schemas)
    entry = entries.find_entry(entries.read_entries(cluster, decoder, topics), name)
    original = next(entries.originals(cluster, decoder, topics, [entry]))
    try:
        return entry, original, decoder.decode(original.value), ""
    except (Undecodable, UnknownSchema) as e:
        return entry, original, None, str(e)


@app.command("show")
def dlq_show(
    name: Id, overrides: Overrides = None, config: Config = None, form: Form = "table"
) -> None:
    """All that is known of a dead letter: why, with the traceback, and what the record says."""
    settings = settings_of(config, overrides)
    from schemas.codec.record_json import to_json

    entries = load(ENTRIES)
    entry, original, event, why = _look(settings, entries, name)
    shown = _entry_as_dict(entry, {entry.record_id.short} if "@" in name else set())
    if event is not None:
        shown["record_json"] = to_json(event)
    else:
        first = original.value[:HEX_BYTES].hex(" ", -4) if original.value is not None else None
        shown |= {"unreadable": why, "first_bytes": first}
    headers = original.headers
    shown["headers"] = (
        None if headers is None else {n: v.decode(errors="replace") for n, v in headers.items()}
    )
    shown["detail"] = original.detail
    if form == "json":
        typer.echo(json.dumps(shown, ensure_ascii=False))
        return
    for title, said in shown.items():
        if title in ("occurrences", "resolutions"):
            for one in said:
                typer.echo(
                    f"{title[:-1]}: "
                    f"{', '.join(f'{n} {v}' for n, v in one.items() if v is not None)}"
                )
        elif title == "detail":
            typer.echo(f"detail:\n{said}")
        else:
            text = (
                json.dumps(said, indent=1, ensure_ascii=False) if isinstance(said, dict) else said
            )
            typer.echo(f"{title}: {'-' if text is None else text}")


# -- acting


@app.command("repair")
def dlq_repair(
    name: Id,
    overrides: Overrides = None,
    config: Config = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="field=value; may be repeated. a.b.0=value reaches inside."),
    ] = None,
    edit: Annotated[
        Path | None,
        typer.Option(
            "--edit", help="The record as --out wrote it, edited; - reads standard input."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Only write the record there, as JSON to edit.")
    ] = None,
    note: Note = None,
    force: Force = False,
) -> None:
    """Change a record and send it to its topic, under the key that belongs to it."""
    settings = settings_of(config, overrides)
    from schemas.codec.record_json import changed

    entries, redrive = load(ENTRIES), load(REDRIVE)
    cluster_of(settings)
    if out is not None:
        _, original, event, _ = _look(settings, entries, name)
        _written(
            out, json.dumps(redrive.editable(original, event), indent=1, ensure_ascii=False) + "\n"
        )
        typer.echo(f"wrote {out}: edit it, then `clawstream dlq repair {name} --edit {out}`")
        return
    said = _edited(edit) if edit is not None else None
    with redrive.Redriver(settings) as redriver:
        entry = entries.find_entry(redriver.entries, name)
        if said is None:
            original = redriver.original(entry)
            said = redrive.editable(original, redriver.event_of(original))
        if not said["type"]:
            fail(f"{name} can't be read: write the record with --out, edit it, send it with --edit")
        sent = redriver.repair(
            entry, said["type"], changed(said["record"], changes or ()), force, note
        )
    typer.echo(_told(sent, name))


def _written(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as e:
        fail(f"--out {path}: {e}", 2)


def _edited(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(sys.stdin.read() if str(path) == "-" else path.read_text())
    except (OSError, ValueError, RecursionError) as e:
        fail(f"--edit {path}: {e}", 2)
    if not (
        isinstance(said, dict)
        and isinstance(said.get("type"), str)
        and isinstance(said.get("record"), dict)
    ):
        fail(f'--edit {path}: must be {{"type": "Step", "record": {{...}}}}, as --out writes it', 2)
    return said


@app.command("replay")
def dlq_replay(
    given: Ids = None,
    config: Config = None,
    topic: Topic = None,
    process: Process = None,
    reason: Reason = None,
    run: Run = None,
    since: Since = None,
    every: Every = False,
    note: Note = None,
    yes: Yes = False,
    force: Force = False,
) -> None:
    """Send records again unchanged, once the cause of their failure is fixed: by id, by filter, or
    all.
    """
    asked = _Asked(given, config, (topic, process, reason, run), since, every, yes)
    _act(asked, lambda redriver, some: redriver.replay(some, force, note))


@app.command("dismiss")
def dlq_dismiss(
    given: Ids = None,
    config: Config = None,
    topic: Topic = None,
    process: Process = None,
    reason: Reason = None,
    run: Run = None,
    since: Since = None,
    every: Every = False,
    note: Note = None,
    yes: Yes = False,
) -> None:
    """Say that nothing is to be done: they are listed no more as open. Their bytes stay."""
    asked = _Asked(given, config, (topic, process, reason, run), since, every, yes)
    _act(asked, lambda redriver, some: redriver.dismiss(some, note))


class _Asked(NamedTuple):
    """What a command that acts was told. marks: topic, process, reason, run."""

    given: Sequence[str] | None
    config: Path | None
    marks: tuple[str | None, ...]
    since: str | None
    every: bool
    yes: bool


def _act(asked: _Asked, do: Callable[[Any, list[Any]], Iterable[Any]]) -> None:
    """Apply an action to the entries of these ids or of this filter; exit 1 when one fails."""
    names, overrides = _split(asked.given)
    settings, after = settings_of(asked.config, overrides), _since(asked.since)
    if bool(names) == any((*asked.marks, asked.since, asked.every)):
        fail(
            "name dead letters by id, or choose them by --topic, --process, --reason, --run, "
            "--since or --all",
            2,
        )
    entries, redrive = load(ENTRIES), load(REDRIVE)
    cluster_of(settings)
    chosen = entries.EntryFilter(*asked.marks, after)
    if not asked.yes:  # a look takes nothing from another who is at it
        some = _some(settings, entries, _read(settings, entries), names, chosen)
        if len(some) > ASK_ABOVE:
            typer.echo(_summary(some))
            fail(f"these are {len(some)}: --yes does it")
    with redrive.Redriver(settings) as redriver:
        some = _some(settings, entries, redriver.entries, names, chosen)
        left = 0
        for sent in do(redriver, some):
            left += sent.why_not is not None
            typer.echo(_told(sent, sent.entry.record_id.short))
    if not names:
        typer.echo(f"{len(some) - left} done, {left} left")
    if left:
        raise SystemExit(1)


def _some(
    settings: Settings, entries: ModuleType, found: Any, names: list[str], chosen: Any
) -> list[Any]:
    if names:
        return list(
            {x.record_id: x for x in (entries.find_entry(found, name) for name in names)}.values()
        )
    return [x for x in found.values() if chosen.matches(x, settings.kafka.topics)]


def _told(sent: Any, name: str) -> str:
    if sent.why_not is not None:
        return f"{name}: not {sent.action}: {sent.why_not}"
    where = (
        f" to {sent.entry.record_id.topic}-{sent.place.partition}-{sent.place.offset}"
        if sent.place is not None
        else ""
    )
    return f"{name}: {sent.action}{where}"
