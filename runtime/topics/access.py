"""The permissions that each process needs on a cluster with ACLs, and the check at its start.

docs/security.md shows the same table; a test compares the two, and another one runs the pipeline
with these permissions alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from shlex import quote
from typing import Literal

from clawstream.runtime.kafka import Cluster, Denied
from clawstream.runtime.kafka.security import allowed_operations
from clawstream.schemas.settings import Settings

Resource = Literal["topic", "group", "transactional-id"]


@dataclass(frozen=True, slots=True)
class Acl:
    """Operations on one resource, or with `prefixed` on all whose names begin so."""

    resource: Resource
    name: str
    operations: tuple[str, ...]
    prefixed: bool = False


EVERY_PROCESS = (
    Acl("topic", "claw.", ("Describe", "DescribeConfigs"), prefixed=True),
    Acl("topic", "claw.schemas", ("Read", "Write")),
    Acl("topic", "claw.dead-letters", ("Write",)),
    Acl("group", "clawstream-", ("Read",), prefixed=True),
)
"""What all processes need beside their own; names as with the topic prefix `claw`."""
PROCESSES: Mapping[str, tuple[Acl, ...]] = {
    "gateway": (
        Acl("topic", "claw.steps", ("Read", "Write")),
        Acl("topic", "claw.rewards", ("Write",)),
        Acl("topic", "claw.workers", ("Read",)),
        Acl("topic", "claw.budgets", ("Read",)),
        Acl("topic", "claw.weights", ("Read",)),
        Acl("group", "claw-gateway", ("Read",)),
    ),
    "assemble": (
        Acl("topic", "claw.steps", ("Read", "Write")),
        Acl("topic", "claw.rewards", ("Read", "Write")),
        Acl("topic", "claw.assembly", ("Read", "Write", "Delete")),
        Acl("topic", "claw.trajectories", ("Read", "Write")),
        Acl("topic", "claw.candidates", ("Read", "Write")),
        Acl("group", "claw-assemble", ("Read",)),
    ),
    "reward": (
        Acl("topic", "claw.trajectories", ("Read",)),
        Acl("topic", "claw.dead-letters", ("Read",)),
        Acl("topic", "claw.rewards", ("Write",)),
        Acl("group", "claw-reward", ("Read",)),
    ),
    "compare": (
        Acl("topic", "claw.candidates", ("Read",)),
        Acl("topic", "claw.trajectories", ("Read",)),
        Acl("topic", "claw.rewards", ("Write",)),
        Acl("group", "claw-compare", ("Read",)),
    ),
    "admit": (
        Acl("topic", "claw.candidates", ("Read", "Write")),
        Acl("topic", "claw.weights", ("Read",)),
        Acl("topic", "claw.runs", ("Read", "Write")),
        Acl("topic", "claw.budgets", ("Write",)),
        Acl("topic", "claw.ready-batches.", ("Create", "Read", "Write"), prefixed=True),
        Acl("group", "claw-admit.", ("Read",), prefixed=True),
        Acl("transactional-id", "claw-admit.", ("Write",), prefixed=True),
    ),
    "lake": (
        Acl("topic", "claw.", ("Read",), prefixed=True),
        Acl("group", "claw-lake", ("Read",)),
    ),
    "trainer": (
        Acl("topic", "claw.ready-batches.", ("Create", "Read"), prefixed=True),
        Acl("topic", "claw.trajectories", ("Read",)),
        Acl("topic", "claw.weights", ("Read", "Write")),
        Acl("topic", "claw.trained-tokens", ("Write",)),
        Acl("group", "claw-trainer.", ("Read",), prefixed=True),
        Acl("transactional-id", "claw-trainer.", ("Write",), prefixed=True),
    ),
    "rollout": (
        Acl("topic", "claw.weights", ("Read",)),
        Acl("topic", "claw.workers", ("Write",)),
        Acl("group", "claw-rollout", ("Read",)),
    ),
    "traces": (
        Acl("topic", "claw.steps", ("Read",)),
        Acl("topic", "claw.candidates", ("Read",)),
        Acl("topic", "claw.ready-batches.", ("Read",), prefixed=True),
        Acl("topic", "claw.weights", ("Read",)),
        Acl("topic", "claw.workers", ("Read",)),
        Acl("group", "claw-traces", ("Read",)),
    ),
    "monitor": (
        Acl("topic", "claw.", ("Read",), prefixed=True),
        Acl("group", "claw-", ("Describe",), prefixed=True),
    ),
    "inspector": (
        Acl("topic", "claw.", ("Read",), prefixed=True),
        Acl("topic", "claw.candidates", ("Write",)),
        Acl("topic", "claw.rewards", ("Write",)),
        Acl("topic", "claw.runs", ("Write",)),
        Acl("group", "claw-inspector", ("Read",)),
        Acl("group", "claw-", ("Describe",), prefixed=True),
    ),
    "operator": (
        Acl("topic", "claw.", ("All",), prefixed=True),
        Acl("group", "claw-", ("All",), prefixed=True),
        Acl("transactional-id", "claw-", ("All",), prefixed=True),
    ),
}
"""Process to its own permissions; `operator`: a person's commands, `topics create` among them."""


def acls_of(process: str, prefix: str) -> tuple[Acl, ...]:
    """Return all permissions of a process.

    Args:
        process: One of `PROCESSES`.
        prefix: The topic prefix.
    """
    return tuple(
        Acl(a.resource, _renamed(a.name, prefix), a.operations, a.prefixed)
        for a in (*EVERY_PROCESS, *PROCESSES[process])
    )


def _renamed(name: str, prefix: str) -> str:
    head = "claw"
    return prefix + name[len(head) :] if name[len(head)] in ".-" else name


def check_access(cluster: Cluster, settings: Settings, process: str) -> None:
    """Check at the start of a process that it may do what it does on the topics that exist.

    Args:
        cluster: The cluster; without an authorizer it allows everything.
        settings: The topic prefix, and the user for the message.
        process: One of `PROCESSES`.

    Raises:
        Denied: Names every missing permission, and the command that prints how to grant them.
    """
    if settings.kafka.security.protocol == "plaintext":
        return  # no user, so that an operator could grant nothing
    prefix = settings.kafka.topic_prefix
    acls = [a for a in acls_of(process, prefix) if a.resource == "topic"]
    names = sorted(name for name in cluster.topics() if name.startswith(f"{prefix}."))
    allowed = allowed_operations(cluster.admin, names)
    missing = [
        f"{operation} on topic {name}"
        for name in names
        for operation in _needed(acls, name)
        if operation not in allowed[name]
    ]
    if missing:
        user = settings.kafka.security.user
        raise Denied(
            f"{f'user {user}' if user else 'the user of the certificate'} may not "
            f"{', '.join(missing)}: `clawstream topics acls {process} --user "
            f"{quote(user) if user else 'NAME'}` prints how to allow it"
        )


def _needed(acls: list[Acl], name: str) -> Iterator[str]:
    for acl in acls:
        if name == acl.name or (acl.prefixed and name.startswith(acl.name)):
            yield from acl.operations


def grant_commands(process: str, prefix: str, user: str) -> Iterator[str]:
    """Yield the arguments of each `kafka-acls` that grant a user the permissions of a process.

    Args:
        process: One of `PROCESSES`.
        prefix: The topic prefix.
        user: The login's name; with client certificates the name in them.
    """
    principal = quote(f"User:{user}")
    for acl in acls_of(process, prefix):
        operations = " ".join(f"--operation {name}" for name in acl.operations)
        pattern = " --resource-pattern-type prefixed" if acl.prefixed else ""
        resource = f"--{acl.resource} {acl.name}{pattern}"
        yield f"--add --allow-principal {principal} {operations} {resource}"
