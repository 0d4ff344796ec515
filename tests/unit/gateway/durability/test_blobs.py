"""Large fields: moved from the record to the blob store, and restored by readers."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.gateway import GatewayFixture, run_gateway
from support.scripted.script import Script, ScriptedChoice

from clawstream.gateway.durability.blobs import THREADS, Blobs
from clawstream.gateway.durability.log import Message
from clawstream.gateway.errors import BlobsUnavailable, RecordTooLarge
from clawstream.rewards.results import no_reward, rules_of
from clawstream.runtime.blob_store import BlobMissing, BlobStore, BlobStoreAway
from clawstream.schemas.blob_refs import MOVABLE, SMALLEST, reference, referenced, shrink
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Blob, Reward, SessionEvent, Step, Trajectory, TrajectoryStep
from clawstream.schemas.settings import JobsSettings, Settings
from clawstream.schemas.topics import MAX_RECORD_BYTES
from clawstream.stream_jobs.lake.tables.catalog import catalog
from clawstream.stream_jobs.lake.tables.table import ConsumedRecord
from clawstream.stream_jobs.worker.blob_fields import resolve_blobs

CODEC = Codec()
MIB = 1 << 20
HI = ScriptedChoice([7, 8, 9], ["Hel", "lo", ""], [-0.5, -0.25, -0.125])


def a_step(**more: Any) -> Step:
    given: dict[str, Any] = {
        "step_id": "t~C.0", "run_id": "r", "trajectory_key": "t", "call_id": "t~C",
        "choice_index": 0, "protocol": "openai.chat", "model": "policy", "status": "ok",
        "streamed": False, "request_json": b"{}", "response_json": b"{}", "gateway_id": "g",
        "received_at": 1, "finished_at": 2,
    }  # fmt: skip
    return Step(**(given | more))


SESSION = SessionEvent(event_id="e", run_id="r", trajectory_key="t", kind="opened", created_at=1)
REWARD = Reward(
    event_id="e", run_id="r", trajectory_key="t", source="env", name="n", function_version="1",
    reward_revision=0, created_at=1,
)  # fmt: skip


def url_of(digest: str) -> str:
    return f"memory://blobs/{digest}"


# ---------------------------------------------------------------- shrink


@given(
    st.integers(0, 60_000),
    st.integers(0, 60_000),
    st.integers(0, 60_000),
    st.integers(3_000, 50_000),
)
def test_shrinking_gives_back_everything_and_fits_if_it_can(
    asked: int, answered: int, ids: int, limit: int
) -> None:
    step = a_step(
        request_json=b"q" * asked,
        response_json=b"a" * answered,
        prompt_token_ids=b"\0" * (ids // 4 * 4),
    )
    small, outside = shrink(step, len(CODEC.encode(step)), url_of, limit)
    assert isinstance(small, Step)
    store = {sha256(data).hexdigest(): data for data in outside}
    back = {b.field: store[b.sha256] for b in small.blobs}
    assert {b.sha256: b.size_bytes for b in small.blobs} == {
        digest: len(data) for digest, data in store.items()
    }
    assert all(
        referenced(b.field, getattr(small, b.field)) == b and b.url == url_of(b.sha256)
        for b in small.blobs
    )
    assert replace(small, blobs=(), **back) == step  # type: ignore[arg-type]
    left = [len(getattr(small, name)) for name in MOVABLE[Step] if name not in back]
    assert len(CODEC.encode(small)) <= limit or all(size < SMALLEST for size in left)
    assert not outside or len(CODEC.encode(step)) > limit


@pytest.mark.parametrize(("record", "field"), [(SESSION, "metadata_json"), (REWARD, "detail_json")])
def test_session_events_and_rewards_shrink_too(record: Any, field: str) -> None:
    large = replace(record, **{field: b"m" * 5 * MIB})
    small, outside = shrink(large, len(CODEC.encode(large)), url_of)
    assert outside == (b"m" * 5 * MIB,) and len(CODEC.encode(small)) < 1000
    blob = referenced(field, getattr(small, field))
    assert blob is not None and blob.size_bytes == 5 * MIB


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"{}",
        b'{"$blob":',
        b'{"$blob":{}}',
        b'{"$blob":{"sha256":1,"size_bytes":2,"url":3}}',
    ],
)
def test_what_is_no_reference_stands_for_itself(value: bytes | None) -> None:
    assert referenced("f", value) is None


# ---------------------------------------------------------------- store


@pytest.mark.parametrize("kind", ["path", "file", "memory"])
def test_bytes_come_back_by_their_digest(tmp_path: Path, kind: str) -> None:
    uri = {
        "path": str(tmp_path / "b"),
        "file": f"file://{tmp_path}/b/",
        "memory": f"memory://{tmp_path.name}",
    }[kind]
    store = BlobStore(uri)
    data = b"\x00image" * 1000
    digest = store.put(data)
    assert digest == sha256(data).hexdigest() == store.put(data)
    assert store.get(digest) == BlobStore(uri).get(digest) == data
    assert store.age_s(digest) < 60 and store.age_s("0" * 64) == float("inf")
    assert store.url_of(digest).startswith("memory://" if kind == "memory" else "file:///")
    for wrong in ("0" * 64, "../../etc/passwd", digest.upper()):
        with pytest.raises(BlobMissing):
            store.get(wrong)


def test_many_writers_of_the_same_bytes_leave_one_whole_file(tmp_path: Path) -> None:
    store, data, barrier = BlobStore(str(tmp_path)), b"x" * MIB, threading.Barrier(8)

    def write(_: int) -> str:
        barrier.wait()
        return store.put(data)

    with ThreadPoolExecutor(8) as pool:
        (digest,) = set(pool.map(write, range(8)))
    assert [p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file()] == [
        Path(digest[:2]) / digest
    ]
    assert store.get(digest) == data


def test_a_writer_that_died_leaves_nothing_that_counts(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path))
    digest = sha256(b"whole").hexdigest()
    (tmp_path / digest[:2]).mkdir()
    (tmp_path / digest[:2] / f".{digest}.1.dead").write_bytes(b"who")
    with pytest.raises(BlobMissing):
        store.get(digest)
    assert store.get(store.put(b"whole")) == b"whole"


def test_altered_bytes_are_not_given_out(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path))
    digest = store.put(b"whole")
    (tmp_path / digest[:2] / digest).write_bytes(b"hole!")
    with pytest.raises(BlobMissing, match="other bytes"):
        store.get(digest)


@pytest.mark.parametrize("uri", ["{}/file/blobs", "nosuchscheme://x"])
def test_a_store_that_is_not_there_is_away(tmp_path: Path, uri: str) -> None:
    (tmp_path / "file").write_text("in the way")
    store = BlobStore(uri.format(tmp_path))
    with pytest.raises(BlobStoreAway):
        store.put(b"x")
    with pytest.raises(BlobStoreAway):
        store.get("0" * 64)


# ---------------------------------------------------------------- messages


def fit(store: BlobStore, *records: Any, timeout_s: float = 30.0) -> list[Any]:
    async def body() -> list[Any]:
        blobs = Blobs(store, CODEC, timeout_s)
        fitted = await blobs.fit([Message("t", b"k", CODEC.encode(r)) for r in records])
        assert all(len(m.value) <= MAX_RECORD_BYTES for m in fitted)
        blobs.close()
        return [CODEC.decode(m.value) for m in fitted]

    return asyncio.run(body())


def test_only_what_is_too_large_is_changed(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path))
    small, large = a_step(), a_step(request_json=b"q" * 5 * MIB)
    same, shrunk = fit(store, small, large)
    assert same == small
    assert (
        store.get(shrunk.blobs[0].sha256) == large.request_json
        and shrunk.response_json == large.response_json
    )


def test_tokens_beyond_what_kafka_takes_are_refused_before_anything_is_stored(
    tmp_path: Path,
) -> None:
    with pytest.raises(RecordTooLarge, match="a Step takes"):
        fit(
            BlobStore(str(tmp_path)),
            a_step(request_json=b"q" * 5 * MIB, prompt_token_ids=bytes(11 * MIB)),
        )
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_hangs_is_away(tmp_path: Path) -> None:
    gate = threading.Event()

    class Hangs(BlobStore):
        def put(self, data: bytes) -> str:
            gate.wait()
            return super().put(data)

    with pytest.raises(BlobsUnavailable, match="within"):
        fit(Hangs(str(tmp_path)), a_step(request_json=b"q" * 5 * MIB), timeout_s=0.05)
    gate.set()


# ---------------------------------------------------------------- the whole gateway


def ask(w: GatewayFixture, size: int, **more: Any) -> Any:
    said = {"model": "policy", "messages": [{"role": "user", "content": "x" * size}]} | more
    return w.http.post(
        w.url + "/t/g/v1/chat/completions", data=io.BytesIO(json.dumps(said).encode())
    )


class Messages(list[Message]):
    """A list that supports weak references."""


@pytest.mark.slow
def test_a_store_that_hangs_holds_no_more_than_its_threads(tmp_path: Path) -> None:
    go_on, began, lock = threading.Event(), list[int](), threading.Lock()

    class Hangs(BlobStore):
        def put(self, data: bytes) -> str:
            with lock:
                began.append(len(data))
            go_on.wait(60)
            return super().put(data)

    value = CODEC.encode(a_step(request_json=b"q" * 5 * MIB))

    async def run() -> None:
        blobs, kept = Blobs(Hangs(str(tmp_path)), CODEC, 1.0), []

        async def one() -> None:
            messages = Messages([Message("steps", b"t", value)])
            kept.append(weakref.ref(messages))
            with pytest.raises(BlobsUnavailable):
                await blobs.fit(messages)

        await asyncio.gather(*(one() for _ in range(THREADS * 3)))
        late = asyncio.create_task(one())
        # All threads have been in the store for too long, so the call fails at once.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert late.done()
        async with asyncio.timeout(60):
            while len(began) < THREADS:  # noqa: ASYNC110 - the threads encode before the store call
                await asyncio.sleep(0.005)
        gc.collect()
        assert len([ref for ref in kept if ref() is not None]) <= THREADS == len(began)
        go_on.set()  # the store answers again, which frees its threads
        async with asyncio.timeout(60):
            while True:
                try:
                    (small,) = await blobs.fit(Messages([Message("steps", b"t", value)]))
                    break
                except BlobsUnavailable:
                    await asyncio.sleep(0.01)
        assert len(small.value) < 1000
        blobs.close()

    asyncio.run(run())


def store_of(w: GatewayFixture) -> BlobStore:
    return BlobStore(w.settings.blob_uri)


@pytest.mark.slow
def test_a_large_body_is_answered_and_kept_outside(tmp_path: Path) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with ask(w, 12 * MIB, n=2) as r:
            assert r.status == 200, await r.text()
        one, two = w.steps()
        assert len(CODEC.encode(one)) < 10_000
        (blob,) = one.blobs
        assert blob.field == "request_json" and two.blobs == one.blobs, (
            "the same bytes are kept once"
        )
        body = json.loads(store_of(w).get(blob.sha256))
        assert body["messages"][0]["content"] == "x" * 12 * MIB
        assert json.loads(one.response_json)["content"] == "Hello"

    run_gateway(tmp_path, CODEC, scenario, Script([HI, HI]), max_body_bytes=16 * MIB)


def test_a_large_reply_is_kept_outside(tmp_path: Path) -> None:
    told = "y" * 6 * MIB

    async def scenario(w: GatewayFixture) -> None:
        async with ask(w, 10) as r:
            assert (await r.json())["choices"][0]["message"]["content"] == told
        (step,) = w.steps()
        (blob,) = step.blobs
        assert (
            blob.field == "response_json"
            and json.loads(store_of(w).get(blob.sha256))["content"] == told
        )

    run_gateway(tmp_path, CODEC, scenario, Script([ScriptedChoice([1], [told], [-0.1])]))


def test_without_a_store_the_record_waits_whole_in_the_spool_and_goes_outside_later(
    tmp_path: Path,
) -> None:
    (tmp_path / "blobs").write_text("in the way")

    async def scenario(w: GatewayFixture) -> None:
        async with ask(w, 5 * MIB) as r:
            assert r.status == 200
        async with ask(w, 5) as r:
            assert r.status == 200
        assert w.records() == [] and w.producer.reachable
        large, small = w.spooled()
        assert len(large.request_json) > 5 * MIB and large.blobs == ()
        (tmp_path / "blobs").unlink()
        await w.until(lambda: len(w.steps()) == 2)
        assert [s.step_id for s in w.steps()] == [large.step_id, small.step_id], (
            "the order of the trajectory holds"
        )
        assert store_of(w).get(w.steps()[0].blobs[0].sha256) == large.request_json

    run_gateway(tmp_path, CODEC, scenario, Script([HI]))


def test_neither_store_nor_spool_is_503(tmp_path: Path) -> None:
    (tmp_path / "blobs").write_text("in the way")

    async def scenario(w: GatewayFixture) -> None:
        async with ask(w, 5 * MIB) as r:
            assert r.status == 503 and (await r.json())["error"]["code"] == "not_recorded"
        assert w.records() == [] and w.spooled() == []

    run_gateway(tmp_path, CODEC, scenario, Script([HI]), spool_max_bytes=MIB)


# ---------------------------------------------------------------- readers


def a_trajectory(metadata: bytes | None, *replies: bytes) -> Trajectory:
    steps = tuple(
        TrajectoryStep(
            step_id=f"t~C.{i}", index=i, status="ok", drift="root", prompt_tokens=1,
            response_tokens=1, response_json=reply, trainable=True, offset=i,
        ) for i, reply in enumerate(replies)
    )  # fmt: skip
    return Trajectory(
        run_id="r", trajectory_key="t", trajectory_id="t", group_id="t", channel="train",
        outcome="completed", opened_at=0, closed_at=1, metadata_json=metadata, part=0, parts=1,
        segments=(), steps=steps,
    )  # fmt: skip


def blob_of(store: BlobStore, data: bytes) -> bytes:
    digest = store.put(data)
    return reference(Blob(field="f", url=store.url_of(digest), sha256=digest, size_bytes=len(data)))


def find(target: str) -> Any:
    raise AssertionError(f"{target} is built in")


def test_reward_functions_see_what_lies_outside(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path))
    kept = a_trajectory(
        blob_of(store, b'{"gold":"42"}'), b'{"content":"1"}', blob_of(store, b'{"content":"42"}')
    )
    whole = a_trajectory(b'{"gold":"42"}', b'{"content":"1"}', b'{"content":"42"}')
    assert resolve_blobs(kept, store.get) == whole and resolve_blobs(whole, store.get) == whole


def test_a_reference_that_was_made_up_reads_nothing(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path / "blobs"))
    secret = tmp_path / "secret"
    secret.write_bytes(b"password")
    digest = sha256(b"password").hexdigest()
    made_up = reference(Blob(field="f", url=secret.as_uri(), sha256=digest, size_bytes=8))
    with pytest.raises(BlobMissing):
        resolve_blobs(a_trajectory(made_up, b"{}"), store.get)
    wrong_size = reference(Blob(field="f", url="", sha256=store.put(b"x"), size_bytes=8))
    with pytest.raises(BlobMissing, match="not the 8"):
        resolve_blobs(a_trajectory(wrong_size, b"{}"), store.get)


def test_a_rule_that_can_not_be_asked_says_so() -> None:
    jobs = JobsSettings(reward_functions={"r": ("exact_match@1",)})
    (rule,) = rules_of(Settings(jobs=jobs), find)["r"]
    reward = no_reward(a_trajectory(None), rule, 5, "no blob x")
    assert (reward.value, reward.reason, reward.trajectory_id) == (None, "no blob x", "t")


def test_the_lake_shows_where_a_field_lies(tmp_path: Path) -> None:
    (step,) = fit(BlobStore(str(tmp_path)), a_step(request_json=b"q" * 5 * MIB))
    table = catalog()["steps"]
    (row,) = table.arrow(table.rows_of(ConsumedRecord("T", 0, 0, 0, {}, step))).to_pylist()
    (blob,) = row["blobs"]
    assert (
        blob["field"] == "request_json"
        and blob["url"] == (tmp_path / blob["sha256"][:2] / blob["sha256"]).as_uri()
    )
    assert json.loads(row["request_json"])["$blob"]["size_bytes"] == 5 * MIB


def test_default_places(tmp_path: Path) -> None:
    settings = Settings.model_validate(
        {"data_dir": tmp_path, "jobs": {"closed_horizon_s": 10_000.0}}
    )
    assert settings.blob_uri == str(tmp_path / "blobs") and settings.spool_max_age_s == 5000
