"""Test which dead letters can be sent again."""

from __future__ import annotations

import pytest
from support.assemble import failed_call

from clawstream.ops.dead_letters.redrive import check, key_of
from clawstream.schemas.settings import Settings


@pytest.mark.parametrize(("trajectory", "key"), [("t", b"t"), (None, b"None~F0")])
def test_a_failed_call_goes_back_under_the_key_that_it_had(
    trajectory: str | None, key: bytes
) -> None:
    event = failed_call(trajectory)
    assert key_of(event) == key
    check(Settings(), "claw.steps", event, None)
