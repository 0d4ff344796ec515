"""`clawstream dlq`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from clawstream.cli.common_options import (
    Config,
    Form,
    cluster_of,
    command,
    fail,
    group,
    names_and_overrides,
    print_json,
    settings_of,
)
from clawstream.ops.dead_letters.entries import DeadLetterEntry, DeadLetterLog, EntryFilter
from clawstream.ops.dead_letters.redrive import Redriver, RedriveResult, sent_to
from clawstream.schemas.codec.record_json import to_json
from clawstream.schemas.errors import Undecodable, UnknownSchema
from clawstream.schemas.settings import Settings
from clawstream.text_table import text_table

app = group()

HEX_BYTES = 256
CONFIRM_ABOVE = 1
"""More records than this are sent only with --yes."""

Topic = Annotated[
    str | None, typer.Option("--topic", help="Topic of the record, with or without the prefix.")
]
Reason = Annotated[
    str | None,
    typer.Option(
        "--reason",
        help="undecodable, unknown_schema, unknown_target, too_many_rewards, untrainable, invalid.",
    ),
]
Run = Annotated[str | None, typer.Option("--run", help="Run of the record, if it is known.")]
Force = Annotated[
    bool,
    typer.Option(
        "--force", help="Include resolved ones named by id, and records that would fail again."
    ),
]
Note = Annotated[str | None, typer.Option("--note", help="Why; kept with the resolution.")]
Id = Annotated[str, typer.Argument(metavar="ID", help="As `list` names it.")]


def _filter(topic: Topic = None, reason: Reason = None, run: Run = None) -> EntryFilter:
    return EntryFilter(topic, reason, run)


# -- looking


@command(app, "list", chosen=_filter)
def dlq_list(
    settings: Settings,
    chosen: EntryFilter,
    resolved: Annotated[
        bool, typer.Option("--all/--open", help="Include resolved dead letters.")
    ] = False,
    form: Form = "table",
) -> None:
    """List the open dead letters, one line each, and count them by reason."""
    log = _read(settings)
    some = log.matching(replace(chosen, resolved=resolved))
    ambiguous = {n for n, count in Counter(s.short for s in log.entries).items() if count > 1}
    if form == "json":
        print_json([_entry_as_dict(x, ambiguous) for x in some])
        return
    head = ("id", "state", "reason", "process", "run", "record", "since", "detail")
    rows = (
        (
            *(_name(x, ambiguous), x.state, x.reason),
            "+".join(dict.fromkeys(o.process for o in x.occurrences)),
            *(x.run or "-", x.kind or "-"),
            *(_time(x.occurrences[0].created_at), x.occurrences[0].detail[:60]),
        )
        for x in some
    )
    typer.echo(text_table(head, rows))
    typer.echo(_summary(some))


def _read(settings: Settings) -> DeadLetterLog:
    cluster_of(settings)  # or a short error
    return DeadLetterLog(settings)


def _time(micros: int) -> str:
    return datetime.fromtimestamp(micros / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _name(entry: DeadLetterEntry, ambiguous: Container[str]) -> str:
    short = entry.record_id.short
    return entry.record_id.full if short in ambiguous else short


def _entry_as_dict(entry: DeadLetterEntry, ambiguous: Container[str]) -> dict[str, Any]:
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
                "process": o.process,
                "reason": o.reason,
                "detail": o.detail,
                "at": o.at,
                "created": _time(o.created_at),
            }
            for o in entry.occurrences
        ],
        "resolutions": [
            {
                "action": r.action,
                "sent": sent_to(r),
                "by": r.by,
                "note": r.note,
                "created": _time(r.created_at),
            }
            for r in entry.resolutions
        ],
    }


def _summary(entries: Sequence[DeadLetterEntry]) -> str:
    states = Counter(x.state for x in entries)
    reasons = Counter(x.reason for x in entries if x.state == "open")
    by_reason = ", ".join(f"{n} {reason}" for reason, n in reasons.most_common())
    done = "".join(f"; {n} {state}" for state, n in states.most_common() if state != "open")
    return f"{states['open']} open{f': {by_reason}' if by_reason else ''}{done}"


@command(app, "show")
def dlq_show(name: Id, settings: Settings, form: Form = "table") -> None:
    """Show a dead letter: the reason, with the traceback, and the fields of the record."""
    log = _read(settings)
    entry = log.find(name)
    original = log.original(entry)
    shown = _entry_as_dict(entry, {entry.record_id.short} if "@" in name else ())
    try:
        shown["record_json"] = to_json(log.decoder.decode(original.value))
    except (Undecodable, UnknownSchema) as e:
        first = original.value[:HEX_BYTES].hex(" ", -4) if original.value is not None else None
        shown |= {"unreadable": str(e), "first_bytes": first}
    headers = original.headers
    shown["headers"] = (
        None if headers is None else {n: v.decode(errors="replace") for n, v in headers.items()}
    )
    shown["detail"] = original.detail
    if form == "json":
        print_json(shown)
        return
    for title, value in shown.items():
        if title in ("occurrences", "resolutions"):
            for one in value:
                fields = ", ".join(f"{n} {v}" for n, v in one.items() if v is not None)
                typer.echo(f"{title[:-1]}: {fields}")
        elif title == "detail":
            typer.echo(f"detail:\n{value}")
        else:
            text = value
            if isinstance(value, dict):
                text = json.dumps(value, indent=1, ensure_ascii=False)
            typer.echo(f"{title}: {'-' if text is None else text}")


# -- acting


@dataclass(frozen=True, slots=True)
class Selection:
    """The entries that a command acts on: those named by id, or else those of the filter."""

    settings: Settings
    names: Sequence[str]
    chosen: EntryFilter
    yes: bool

    def entries(self, log: DeadLetterLog) -> list[DeadLetterEntry]:
        """Return the selected entries. Raises NoSuchEntry."""
        if self.names:
            found = (log.find(name) for name in self.names)
            return list({x.record_id: x for x in found}.values())
        return log.matching(self.chosen)


def _selection(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ID]... [a.b=c]...", help="Dead letters, as `list` names them; settings."
        ),
    ] = None,
    config: Config = None,
    topic: Topic = None,
    reason: Reason = None,
    run: Run = None,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it, also for many.")] = False,
) -> Selection:
    names, overrides = names_and_overrides(words)
    settings = settings_of(config, overrides)
    if bool(names) == any((topic, reason, run, every)):
        fail("name dead letters by id, or choose them by --topic, --reason, --run or --all", 2)
    return Selection(settings, names, _filter(topic, reason, run), yes)


@command(app, "replay", selection=_selection)
def dlq_replay(selection: Selection, note: Note = None, force: Force = False) -> None:
    """Send records again, once the cause of their failure is fixed."""
    _act(selection, lambda redriver, some: redriver.replay(some, force, note))


@command(app, "dismiss", selection=_selection)
def dlq_dismiss(selection: Selection, note: Note = None) -> None:
    """Resolve dead letters without sending them; they are no longer listed as open."""
    _act(selection, lambda redriver, some: redriver.dismiss(some, note))


def _act(
    selection: Selection,
    action: Callable[[Redriver, list[DeadLetterEntry]], Iterable[RedriveResult]],
) -> None:
    """Apply an action to the selected entries; exit 1 when it fails for one."""
    if not selection.yes:  # reading alone does not fence another redriver
        some = selection.entries(_read(selection.settings))
        if len(some) > CONFIRM_ABOVE:
            typer.echo(_summary(some))
            fail(f"these are {len(some)}: --yes does it")
    cluster_of(selection.settings)
    with Redriver(selection.settings) as redriver:
        some = selection.entries(redriver.log)
        left = 0
        for result in action(redriver, some):
            left += result.why_not is not None
            typer.echo(_outcome(result, result.entry.record_id.short))
    if not selection.names:
        typer.echo(f"{len(some) - left} done, {left} left")
    if left:
        raise SystemExit(1)


def _outcome(result: RedriveResult, name: str) -> str:
    if result.why_not is not None:
        return f"{name}: not {result.action}: {result.why_not}"
    place, topic = result.place, result.entry.record_id.topic
    where = "" if place is None else f" to {topic}-{place.partition}-{place.offset}"
    return f"{name}: {result.action}{where}"
