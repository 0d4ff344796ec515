"""Test session keys and the secret that signs them."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from clawstream.gateway.auth.session_keys import CACHED, Session, SessionKeys, secret_of
from clawstream.gateway.errors import WrongKey
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import Settings


def test_session_key_says_what_was_minted_and_nothing_else() -> None:
    keys = SessionKeys(b"secret")
    session = Session("run-1", "t:1", "task über", "val", "0123456789ab")
    key = keys.mint(session)
    assert key.startswith("sk-claw-") and keys.read(key) == session
    assert keys.read(keys.mint(Session("r", "t"))) == Session("r", "t", None, None, None)
    for wrong in (
        key[:-1],
        key + "A",
        key.replace("sk-claw-", "sk-claw-A"),
        "sk-claw-",
        "sk-claw-..",
        key.split(".")[0],
    ):
        with pytest.raises(WrongKey):
            keys.read(wrong)
    with pytest.raises(WrongKey):
        SessionKeys(b"other").read(key)


def test_known_session_keys_are_bounded_and_a_wrong_one_is_not_remembered() -> None:
    keys, session = SessionKeys(b"secret"), Session("r", "t")
    key = keys.mint(session)
    for n in range(CACHED + 10):
        assert keys.find(key, n.to_bytes(32, "big")) == session
    assert len(keys._cache) == CACHED
    for _ in range(2):
        with pytest.raises(WrongKey):
            keys.find(key + "x", b"digest of the wrong key")


def test_secret_is_made_once_for_all_gateways_of_a_directory(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "d")
    secret = secret_of(settings)
    assert secret == secret_of(settings) and len(secret) > 30
    assert stat.S_IMODE((tmp_path / "d/session-secret").stat().st_mode) == 0o600
    assert [p.name for p in (tmp_path / "d").iterdir()] == ["session-secret"]
    given = "given by a person"
    assert (
        secret_of(Settings.model_validate({"gateway": {"session_secret": given}})) == given.encode()
    )


@pytest.mark.parametrize("secret", ["", " " * 40, "fifteen-of-them"])
def test_a_secret_that_can_be_guessed_is_refused(tmp_path: Path, secret: str) -> None:
    with pytest.raises(
        SettingsError, match=r"setting gateway\.session_secret: .* at least 16"
    ) as error:
        secret_of(Settings.model_validate({"gateway": {"session_secret": secret}}))
    assert secret == "" or secret not in str(error.value)
    (tmp_path / "session-secret").write_text(secret + "\n")
    with pytest.raises(SettingsError, match=r"session-secret: .* at least 16.*[Dd]elete"):
        secret_of(Settings(data_dir=tmp_path))
