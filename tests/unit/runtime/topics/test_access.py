"""Test the permissions of each process: names under another prefix, and one table in the docs."""

from __future__ import annotations

from pathlib import Path
from shlex import split

from clawstream.runtime.topics.access import EVERY_PROCESS, PROCESSES, Acl, acls_of, grant_commands

ROOT = Path(__file__).parents[4]


def row(process: str, acls: tuple[Acl, ...]) -> str:
    cells = {
        resource: "; ".join(
            f"`{a.name}{'*' if a.prefixed else ''}` {', '.join(a.operations)}"
            for a in acls
            if a.resource == resource
        )
        for resource in ("topic", "group", "transactional-id")
    }
    return f"| {process} | {' | '.join(cells.values())} |".replace("|  |", "| |")


def test_the_documentation_has_the_same_table() -> None:
    rows = [row("every process", EVERY_PROCESS), *(row(p, a) for p, a in PROCESSES.items())]
    assert "\n".join(rows).replace("|  |", "| |") in (ROOT / "docs" / "security.md").read_text()


def test_another_prefix_changes_only_the_names_under_it() -> None:
    names = {a.name for a in acls_of("admit", "mine")}
    assert {"mine.", "mine.candidates", "mine-admit.", "clawstream-"} < names
    assert not any(name.startswith(("claw.", "claw-")) for name in names)


def test_the_commands_name_user_operations_and_resource() -> None:
    lines = list(grant_commands("lake", "mine", "bob"))
    assert (
        "--add --allow-principal User:bob --operation Read --topic mine. "
        "--resource-pattern-type prefixed" in lines
    )
    assert "--add --allow-principal User:bob --operation Read --group mine-lake" in lines


def test_a_name_of_a_certificate_is_one_word_of_the_command() -> None:
    for line in grant_commands("lake", "claw", "CN=a b,O=c"):
        assert split(line)[2] == "User:CN=a b,O=c"
