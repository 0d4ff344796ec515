"""Mint and read session keys, which name a trajectory. Stateless: any gateway serves any session.

A session key is `sk-claw-<base64url of JSON {r,k,g,c,a}>.<base64url of HMAC-SHA256>`: run,
trajectory key, group, channel, and the id of the API key that opened it. It expires with that API
key. The signature covers the part before the dot. The secret is gateway.session_secret, else a file
of mode 0600 in data_dir, created once.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import orjson

from gateway.auth import api_keys
from gateway.errors import BadRequest, WrongKey
from runtime.atomic_file import create_durably
from schemas.errors import InvalidId, SettingsError
from schemas.ids import check_group_id, check_run_id, check_trajectory_key
from schemas.records import Channel
from schemas.settings import Settings

PREFIX = "sk-claw-"
OURS = (api_keys.PREFIX, PREFIX)
"""Prefixes of this installation's keys. The resolver reads such keys; no engine receives them."""
CHANNEL_HEADER = "x-clawstream-channel"
SECRET_BYTES = 16
"""Minimum length of a session secret."""
KEPT = 4096
"""Session keys whose verified signature is cached."""


@dataclass(frozen=True, slots=True)
class TrajectoryRef:
    """Identify the trajectory of a record.

    group_id None: the trajectory is its own group. channel None: the request named no channel.
    """

    run_id: str
    trajectory_key: str
    group_id: str | None
    channel: Channel | None

    @property
    def kafka_key(self) -> bytes:
        return self.trajectory_key.encode()


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class Session(NamedTuple):
    """Hold the content of a session key.

    key_id: id of the API key that opened the session; None: the gateway was open.
    """

    origin: TrajectoryRef
    key_id: str | None


class SessionKeys:
    """Mint and read session keys.

    secret: any bytes, the same for all gateways of an installation.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._known: OrderedDict[bytes, Session] = OrderedDict()

    def mint(self, origin: TrajectoryRef, key_id: str | None = None) -> str:
        """Return the key of a session. key_id: id of the API key that opens it."""
        fields = {
            "r": origin.run_id, "k": origin.trajectory_key, "g": origin.group_id,
            "c": origin.channel, "a": key_id,
        }  # fmt: skip
        payload = _b64(orjson.dumps({k: v for k, v in fields.items() if v is not None}))
        return f"{PREFIX}{payload}.{self._sign(payload)}"

    def find(self, key: str, digest: bytes) -> Session:
        """Return the content of a key, from the cache if possible.

        Args:
            key: The session key.
            digest: Its SHA-256, the key of the cache, so that the cache holds no session key.

        Raises:
            WrongKey: See `read`.
        """
        known = self._known.get(digest)
        if known is not None:
            self._known.move_to_end(digest)
            return known
        known = self._known[digest] = self.read(key)
        if len(self._known) > KEPT:
            self._known.popitem(last=False)
        return known

    def read(self, key: str) -> Session:
        """Return the content of a key.

        Raises:
            WrongKey: The signature is wrong, or the signed content is unreadable.
        """
        payload, _, signature = key.removeprefix(PREFIX).partition(".")
        if not hmac.compare_digest(signature.encode(), self._sign(payload).encode()):
            raise WrongKey(
                "this session key was not minted here: POST /sessions gives one", "authorization"
            )
        try:
            said = orjson.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
            return Session(
                TrajectoryRef(said["r"], said["k"], said.get("g"), said.get("c")), said.get("a")
            )
        except (binascii.Error, orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise WrongKey(
                "the session key is signed by us but unreadable: mint a new one", "authorization"
            ) from error

    def _sign(self, payload: str) -> str:
        return _b64(hmac.digest(self._secret, payload.encode(), hashlib.sha256))


def secret_of(settings: Settings) -> bytes:
    """Return the installation's secret; create it on first use when the settings have none.

    Concurrent gateways may call this safely.

    Raises:
        SettingsError: The secret is too short.
    """
    if settings.gateway.session_secret is not None:
        return _long_enough(
            settings.gateway.session_secret.encode(),
            "setting gateway.session_secret",
            "Take a long random one, or leave it out and one is made",
        )
    path = settings.data_dir / "session-secret"
    if not path.exists():
        _make_secret(path)
    return _long_enough(
        path.read_bytes().strip(),
        f"session secret {path}",
        "Restore it, or delete it and one is made; that ends all sessions",
    )


def _long_enough(secret: bytes, where: str, what_to_do: str) -> bytes:
    """Check the length: a caller who guesses the secret can mint session keys of any run."""
    size = len(secret.strip())
    if size < SECRET_BYTES:
        raise SettingsError(
            f"{where}: {size} bytes, it must have at least {SECRET_BYTES}. {what_to_do}"
        )
    return secret


def _make_secret(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    secret = secrets.token_urlsafe(32).encode()
    with suppress(FileExistsError):  # the first writer wins
        create_durably(path, secret, 0o600)


def channel_of(value: str | None, param: str = CHANNEL_HEADER) -> Channel | None:
    """Parse the channel of a header. Raises BadRequest."""
    match value:
        case None | "train" | "val":
            return value
        case _:
            raise BadRequest(f"{param}: {value[:40]!r} is no channel, use train or val", param)


def checked(run: str, key: str, group: str | None, channel: Channel | None) -> TrajectoryRef:
    """Return a reference with valid ids. Raises BadRequest that names the invalid id."""
    for name, check, value in (
        ("run_id", check_run_id, run),
        ("trajectory_key", check_trajectory_key, key),
        ("group_id", check_group_id, group),
    ):
        if value is not None:
            try:
                check(value)
            except InvalidId as error:
                raise BadRequest(str(error), name) from error
    return TrajectoryRef(run, key, group, channel)
