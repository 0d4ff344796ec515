"""API keys and their permissions, in a file that `clawstream keys` writes and all gateways read.

A key is `claw-` and 256 random bits; the file stores only its SHA-256. A slow hash such as bcrypt
protects secrets that can be guessed. A key of 256 random bits cannot be guessed, however fast the
hash is, and a lookup by digest takes a microsecond instead of 100 ms. The duration of a lookup by
digest does not reveal how many characters of a key are correct.

The file is replaced as a whole, with mode 0600 and under a lock. So concurrent writers lose no keys
and readers never see a partial file.
"""

from __future__ import annotations

import fcntl
import hashlib
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from clawstream.gateway.errors import KeysUnreadable, KeyTaken, NoSuchKey, Unprocessable
from clawstream.runtime.atomic_file import write_durably
from clawstream.runtime.logs import logger
from clawstream.schemas.ids import RUN_ID

Scope = Literal["agent", "reward", "curate", "admin"]
SCOPES: tuple[Scope, ...] = ("agent", "reward", "curate", "admin")
"""The permissions of a key.

agent: Model calls, sessions and their completion.
reward: Rewards.
curate: Curations.
admin: Everything.
"""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
PREFIX = "claw-"
ID_CHARS = 12


Limit = Annotated[int, Field(ge=1, lt=2**53)] | None


class ApiKey(BaseModel):
    """The stored data of a key.

    sha256: Hex digest of the key.
    run_id: The run of all its records.
    created_at, expires_at: Seconds since the epoch.

    The limits apply to the model calls of the key in one gateway process; see `key_limits`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._@-]{1,64}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    scopes: Annotated[tuple[Scope, ...], Field(min_length=1)]
    run_id: Annotated[str, Field(pattern=f"^{RUN_ID.pattern}$")] | None = None
    created_at: int
    expires_at: int | None = None
    calls_per_minute: Limit = None
    calls_at_once: Limit = None
    tokens_per_day: Limit = None

    @property
    def limited(self) -> bool:
        """Whether the key has a limit."""
        return any(
            v is not None for v in (self.calls_per_minute, self.calls_at_once, self.tokens_per_day)
        )

    @property
    def key_id(self) -> str:
        """Public identifier of the key."""
        return self.sha256[:ID_CHARS]

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes or "admin" in self.scopes


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    keys: tuple[ApiKey, ...] = ()


def scope_of(text: str) -> Scope:
    """Parse the name of a scope. Raises Unprocessable."""
    for scope in SCOPES:
        if scope == text:
            return scope
    raise Unprocessable(f"scope: {text[:40]!r} is none of {', '.join(SCOPES)}", "scope")


def digest_of(key: str) -> bytes:
    """Return the SHA-256 of a key: 32 bytes."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Read all keys of the file; none if the file does not exist. Raises KeysUnreadable."""
    try:
        return _File.model_validate_json(path.read_bytes()).keys
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise KeysUnreadable(
            f"API keys {path}: {error}. Check gateway.api_keys_file and its owner"
        ) from error
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "(all)"
        raise KeysUnreadable(
            f"API keys {path}: {where}: {first['msg']}. "
            "Restore it, or write it by `clawstream keys`"
        ) from error


def create_key(
    path: Path,
    name: str,
    scopes: Sequence[Scope],
    run_id: str | None = None,
    expires_at: int | None = None,
    calls_per_minute: int | None = None,
    calls_at_once: int | None = None,
    tokens_per_day: int | None = None,
) -> str:
    """Create a key and store its hash.

    Returns:
        The key. It cannot be retrieved later.

    Raises:
        KeyTaken: The name is in use.
        Unprocessable: An argument is not valid.
    """
    key = PREFIX + secrets.token_urlsafe(32)
    try:
        made = ApiKey(
            name=name,
            sha256=digest_of(key).hex(),
            scopes=tuple(dict.fromkeys(scopes)),
            run_id=run_id,
            created_at=int(time.time()),
            expires_at=expires_at,
            calls_per_minute=calls_per_minute,
            calls_at_once=calls_at_once,
            tokens_per_day=tokens_per_day,
        )
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        field = str(first["loc"][0])
        raise Unprocessable(f"{field}: {first['msg']}", field) from error
    with _locked(path):
        keys = read_keys(path)
        if any(k.name == name for k in keys):
            raise KeyTaken(f"there is a key named {name!r}: revoke it first, or take another name")
        _write(path, (*keys, made))
    return key


def revoke_key(path: Path, name: str) -> ApiKey:
    """Remove a key. Gateways reject the key and the sessions it opened about a second later.

    Args:
        path: The file of the keys.
        name: Name or id of the key.

    Raises:
        NoSuchKey: No key has this name or id.
    """
    with _locked(path):
        keys = read_keys(path)
        gone = next((k for k in keys if name in (k.name, k.key_id)), None)
        if gone is None:
            raise NoSuchKey(f"no key is named {name!r}: see `clawstream keys list`")
        _write(path, tuple(k for k in keys if k is not gone))
    return gone


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(path: Path, keys: tuple[ApiKey, ...]) -> None:
    write_durably(
        path, _File(keys=keys).model_dump_json(indent=1, exclude_none=True).encode(), 0o600
    )


class KeyRing:
    """The keys of the file in memory. now: Clock, seconds since the epoch."""

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        self._path, self._now = path, now
        self._by_digest: dict[bytes, ApiKey] = {}
        self._by_id: dict[str, ApiKey] = {}
        self._seen: tuple[int, ...] | None = None
        self.reload()

    def __len__(self) -> int:
        return len(self._by_digest)

    def reload(self) -> bool:
        """Read the file if it has changed since the last read.

        Returns:
            Whether the file had changed.

        Raises:
            KeysUnreadable: The file cannot be read. The keys in memory stay as they were.
        """
        try:
            found = self._path.stat()
            file = (found.st_mtime_ns, found.st_ino, found.st_size, found.st_mode)
            seen: tuple[int, ...] | None = file
        except FileNotFoundError:
            seen = None
        except OSError as error:
            raise KeysUnreadable(
                f"API keys {self._path}: {error}. Check gateway.api_keys_file"
            ) from error
        if seen == self._seen:
            return False
        keys = read_keys(self._path)
        if seen is not None and seen[-1] & OTHERS_WRITE:
            logger().warning(
                "api_keys_writable_by_others", file=str(self._path),
                action=f"whoever writes it gives keys: chmod 600 {self._path}",
            )  # fmt: skip
        by_digest, by_id = {bytes.fromhex(k.sha256): k for k in keys}, {k.key_id: k for k in keys}
        # Assigned together: a gateway reloads in a thread.
        self._by_digest, self._by_id, self._seen = by_digest, by_id, seen
        return True

    def by_digest(self, digest: bytes) -> ApiKey | None:
        """Return the key with this digest; None: unknown or expired."""
        return self._alive(self._by_digest.get(digest))

    def by_id(self, key_id: str) -> ApiKey | None:
        """Return the key with this id; None: unknown or expired."""
        return self._alive(self._by_id.get(key_id))

    def _alive(self, key: ApiKey | None) -> ApiKey | None:
        if key is None or key.expires_at is None or key.expires_at > self._now():
            return key
        return None
