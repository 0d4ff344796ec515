"""Which trajectory a request belongs to: a stateless function of its path, headers and session key, so any gateway can serve it.

A session key is `sk-claw-<base64url of JSON {r,k,g,c}>.<base64url of HMAC-SHA256>`: run, trajectory key, group, channel. The signature
covers the part before the dot; the secret is gateway.session_secret, else a file of mode 0600 in data_dir, made once.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson

from gateway.errors import BadRequest, WrongKey
from schemas.errors import InvalidId
from schemas.events import Channel
from schemas.ids import check_group_id, check_run_id, check_trajectory_key
from schemas.settings import Settings

PREFIX = "sk-claw-"
RUN_HEADER = "x-clawstream-run"
CHANNEL_HEADER = "x-clawstream-channel"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a record belongs. group_id None: a group of its own. channel None: the request did not say."""

    run_id: str
    trajectory_key: str
    group_id: str | None
    channel: Channel | None

    @property
    def kafka_key(self) -> bytes:
        return self.trajectory_key.encode()


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class SessionKeys:
    """Mints and reads session keys. secret: any bytes, the same for all gateways of an installation."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def mint(self, origin: Origin) -> str:
        """The key of a session."""
        fields = {"r": origin.run_id, "k": origin.trajectory_key, "g": origin.group_id, "c": origin.channel}
        payload = _b64(orjson.dumps({k: v for k, v in fields.items() if v is not None}))
        return f"{PREFIX}{payload}.{self._sign(payload)}"

    def read(self, key: str) -> Origin:
        """What the key says. Raises WrongKey."""
        payload, _, signature = key.removeprefix(PREFIX).partition(".")
        if not hmac.compare_digest(signature.encode(), self._sign(payload).encode()):
            raise WrongKey("this session key was not minted here: POST /sessions gives one", "authorization")
        try:
            said = orjson.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
            return Origin(said["r"], said["k"], said.get("g"), said.get("c"))
        except (binascii.Error, orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise WrongKey("the session key is signed by us but unreadable: mint a new one", "authorization") from error

    def _sign(self, payload: str) -> str:
        return _b64(hmac.digest(self._secret, payload.encode(), hashlib.sha256))


def secret_of(settings: Settings) -> bytes:
    """The installation's secret; made on first use when the settings have none. Safe to race."""
    if settings.gateway.session_secret is not None:
        return settings.gateway.session_secret.encode()
    path = settings.data_dir / "session-secret"
    if not path.exists():
        _make_secret(path)
    return path.read_bytes().strip()


def _make_secret(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(secrets.token_urlsafe(32).encode())
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(draft, path)  # whole or not at all, and only the first one counts
    except FileExistsError:
        pass
    finally:
        draft.unlink()


def bearer_of(headers: Mapping[str, str]) -> str | None:
    """The session key of a request: a bearer token with our prefix. None for any other token or none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    token = token.strip()
    return token if scheme.lower() == "bearer" and token.startswith(PREFIX) else None


def channel_of(value: str | None, param: str = CHANNEL_HEADER) -> Channel | None:
    """A channel as a header says it. Raises BadRequest."""
    match value:
        case None | "train" | "val":
            return value
        case _:
            raise BadRequest(f"{param}: {value[:40]!r} is no channel, use train or val", param)


def origin_of(
    headers: Mapping[str, str], keys: SessionKeys, default_run: str, key: str | None = None, group: str | None = None
) -> Origin:
    """Where a request belongs.

    headers: names in lower case. key, group: trajectory and prompt uid of the path, if it has them. The run is the session key's,
    else the header's, else the setting's; the trajectory is the path's, else the session key's. Raises WrongKey or BadRequest.
    """
    token = bearer_of(headers)
    session = keys.read(token) if token is not None else None
    if key is None and session is None:
        raise WrongKey(
            "no trajectory: use /<trajectory>/<prompt>/v1 as base URL, or a key from POST /sessions as API key",
            "authorization",
        )
    run = session.run_id if session else headers.get(RUN_HEADER) or default_run
    channel = channel_of(headers.get(CHANNEL_HEADER)) or (session.channel if session else None)
    if key is None and session is not None:
        return Origin(session.run_id, session.trajectory_key, session.group_id, channel)
    if group is None and session is not None and session.trajectory_key == key:
        group = session.group_id
    return checked(run, key or "", group, channel)


def checked(run: str, key: str, group: str | None, channel: Channel | None) -> Origin:
    """An origin whose ids are fit to be recorded. Raises BadRequest that names the id."""
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
    return Origin(run, key, group, channel)
