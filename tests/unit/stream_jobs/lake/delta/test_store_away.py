"""An object store that is away: a state of the writer, whose message is one plain line."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from support.away_store import failing_store, options

from clawstream.query.sandbox import run_sql
from clawstream.runtime.exit_codes import exit_code
from clawstream.schemas.settings import LakeSettings, Settings
from clawstream.stream_jobs.errors import LakeAway, SqlError
from clawstream.stream_jobs.lake.delta.log import is_store_away, plain
from clawstream.stream_jobs.lake.delta.maintenance import maintain
from clawstream.stream_jobs.lake.delta.table import open_table
from clawstream.stream_jobs.lake.main import Lake, _when_writable

URI = "s3://bucket/lake"


@pytest.fixture(params=["refused", "SlowDown", "ExpiredToken"])
def storage_options(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    if request.param == "refused":
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))  # and nobody listens
            yield options(unused.getsockname()[1])
    else:
        status = {"SlowDown": 503, "ExpiredToken": 403}[request.param]
        with failing_store(status, request.param) as found:
            yield found


@pytest.mark.slow
def test_it_is_no_damage_and_no_bug(storage_options: dict[str, str]) -> None:
    settings = Settings(lake=LakeSettings(uri=URI, storage_options=storage_options))
    with pytest.raises(LakeAway, match=f"store of {URI}/steps is away: ") as opened:
        open_table(URI, "steps", storage_options)
    message = str(opened.value)
    assert exit_code(opened.value) == 69 and message.isprintable() and "\n" not in message
    with pytest.raises(LakeAway):
        Lake(URI, storage_options, 10).acquire()
    (steps,) = maintain(settings, ["steps"])
    assert "is away" in (steps.deferred or "")
    with pytest.raises(SqlError, match="is away"):
        run_sql(settings, "select 1")


@pytest.mark.slow
def test_a_start_ends_and_a_started_writer_waits(tmp_path: Path) -> None:
    lake, stop, tries = Lake(str(tmp_path), {}, 10), threading.Event(), list[int]()

    def write() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise LakeAway("the store of x is away: refused")

    with pytest.raises(LakeAway):
        _when_writable(lake, write, stop, started=False)
    assert _when_writable(lake, write, stop) and len(tries) == 3
    stop.set()
    tries.clear()
    assert not _when_writable(lake, write, stop)


ANSI = "Kernel error -> Generic S3 error\n \x1b[31m\u21b3\x1b[0m Error performing GET in 2.3s"


def test_the_message_of_the_library_becomes_a_line() -> None:
    assert plain(OSError(ANSI)) == "Kernel error -> Generic S3 error Error performing GET in 2.3s"


@pytest.mark.parametrize(
    ("error", "away"),
    [
        (OSError(ANSI), True),
        (OSError("When listing objects: AWS Error SLOW_DOWN during ListObjectsV2"), True),
        (OSError("The operation lacked the necessary privileges to complete for path x"), True),
        (FileNotFoundError("AWS Error NO_SUCH_KEY during GetObject"), False),
        (OSError("When reading x: AWS Error NO_SUCH_BUCKET during HeadObject"), False),
        (OSError("Generic LocalFileSystem error: Unable to open file"), False),
        (OSError("Couldn't deserialize thrift: TProtocolException"), False),
        (pa.ArrowInvalid("Parquet magic bytes not found in footer"), False),
    ],
)
def test_only_the_store_is_away(error: Exception, away: bool) -> None:
    assert is_store_away(error) is away
