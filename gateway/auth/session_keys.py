"""Mint and read session keys, which name a trajectory. Stateless: any gateway serves any session.

A session key is `sk-claw-<base64url of JSON {r,k,g,c,a}>.<base64url of HMAC-SHA256>`: run,
trajectory key, group, channel, and the id of the API key that opened it. It expires with that API
key. The signature covers the part before the dot. The secret is gateway.session_secret, else a file
of mode 0600 in data_dir, created once.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections import OrderedDict
from contextlib import suppress
from typing import NamedTuple

import orjson

from clawstream.gateway.auth import api_keys
from clawstream.gateway.errors import WrongKey
from clawstream.runtime.atomic_file import create_durably
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.records import Channel
from clawstream.schemas.settings import Settings

PREFIX = "sk-claw-"
KEY_PREFIXES = (api_keys.PREFIX, PREFIX)
"""Prefixes of this installation's keys. The gateway reads such keys; no engine receives them."""
SECRET_BYTES = 16
"""Minimum length of a session secret."""
CACHED = 4096
"""Session keys whose verified signature is cached."""


class Session(NamedTuple):
    """The content of a session key.

    key_id: id of the API key that opened the session; None: the gateway was open.
    """

    run_id: str
    trajectory_key: str
    group_id: str | None = None
    channel: Channel | None = None
    key_id: str | None = None


class SessionKeys:
    """Mint and read session keys.

    secret: any bytes, the same for all gateways of an installation.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._cache: OrderedDict[bytes, Session] = OrderedDict()

    def mint(self, session: Session) -> str:
        """Return the key of a session."""
        fields = {k: v for k, v in zip("rkgca", session, strict=True) if v is not None}
        payload = _b64(orjson.dumps(fields))
        return f"{PREFIX}{payload}.{self._sign(payload)}"

    def find(self, key: str, digest: bytes) -> Session:
        """Return the content of a key, from the cache if possible.

        Args:
            key: The session key.
            digest: Its SHA-256, the key of the cache, so that the cache holds no session key.

        Raises:
            WrongKey: See `read`.
        """
        session = self._cache.get(digest)
        if session is not None:
            self._cache.move_to_end(digest)
            return session
        session = self._cache[digest] = self.read(key)
        if len(self._cache) > CACHED:
            self._cache.popitem(last=False)
        return session

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
            fields = orjson.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
            return Session(
                fields["r"], fields["k"], fields.get("g"), fields.get("c"), fields.get("a")
            )
        except (KeyError, TypeError, ValueError) as error:  # base64 and JSON errors are ValueErrors
            raise WrongKey(
                "the session key is signed by us but unreadable: mint a new one", "authorization"
            ) from error

    def _sign(self, payload: str) -> str:
        return _b64(hmac.digest(self._secret, payload.encode(), hashlib.sha256))


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def secret_of(settings: Settings) -> bytes:
    """Return the installation's secret; create it on first use when the settings have none.

    Concurrent gateways may call this safely.

    Raises:
        SettingsError: The secret is too short: a caller who guesses it can mint session keys of
            any run.
    """
    if settings.gateway.session_secret is not None:
        secret, source = settings.gateway.session_secret.encode(), "setting gateway.session_secret"
        remedy = "Use a long random one, or omit it: a file with one is then created"
    else:
        path = settings.data_dir / "session-secret"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):  # the first writer wins
                create_durably(path, secrets.token_urlsafe(32).encode(), 0o600)
        secret, source = path.read_bytes().strip(), f"session secret {path}"
        remedy = "Restore it, or delete it: a new one is then created, and all sessions end"
    if (size := len(secret.strip())) < SECRET_BYTES:
        raise SettingsError(
            f"{source}: {size} bytes, it must have at least {SECRET_BYTES}. {remedy}"
        )
    return secret
