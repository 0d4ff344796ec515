"""Deltas: bit-equal results, and damage that is found wherever it is."""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.torch import load_file, save_file

from clawstream.runtime.digests import sha256
from clawstream.runtime.errors import WeightsUnreadable
from clawstream.runtime.weights.delta import (
    _CHUNK,
    MAGIC,
    DeltaFile,
    Snapshot,
    decode,
    encode,
    mapped,
    rebuild,
    write_delta,
)
from clawstream.runtime.weights.files import get_files
from clawstream.schemas.records import WeightFile

INTEGERS = [np.dtype(f"<u{width}") for width in (1, 2, 4, 8)]
NAME = "model.safetensors"
FULL, DELTA = "0", ".delta"


@given(st.data(), st.sampled_from(INTEGERS), st.integers(0, 3000))
def test_any_change_of_any_bits_is_restored(data: st.DataObject, dtype: Any, length: int) -> None:
    """The bits of every dtype: NaN payloads, negative zeros and infinities among them."""
    old = data.draw(arrays(dtype, length))
    changes = data.draw(
        st.dictionaries(
            st.integers(0, max(0, length - 1)), st.integers(0, 2 ** (8 * dtype.itemsize) - 1)
        )
    )
    new = old.copy()
    for at, bits in changes.items():
        new[at : at + 1] = bits
    changed, payload = encode(old, new)
    assert changed == np.count_nonzero(old != new)
    if changed:
        decode(payload, changed, old)
    assert np.array_equal(old, new)


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 509, 510, 511, 70_000])
def test_gaps_around_the_limit_of_a_byte(gap: int) -> None:
    old = np.zeros(3 * gap + 9, np.uint16)
    new = old.copy()
    new[[gap, 2 * gap + 1]] = 1
    changed, payload = encode(old, new)
    decode(payload, changed, old)
    assert np.array_equal(old, new)


def test_changes_of_many_chunks() -> None:
    old = np.zeros(_CHUNK + 2000, np.uint16)
    new = old.copy()
    new[1000:] = 1  # a chunk of gaps ends within a chunk of elements
    changed, payload = encode(old, new)
    decode(payload, changed, old)
    assert np.array_equal(old, new)
    with pytest.raises(ValueError, match=r"broadcast|changed elements"):
        decode(payload, changed + 1, old)


def test_a_step_of_one_unit_in_the_last_place_costs_little_more_than_a_byte() -> None:
    rng = np.random.default_rng(0)
    old = rng.integers(0, 2**16, 1 << 20, dtype=np.uint16)
    new = old.copy()
    at = np.flatnonzero(rng.random(old.size) < 0.004)
    new[at] += rng.choice(np.array([1, 65535], np.uint16), at.size)
    changed, payload = encode(old, new)
    assert changed == at.size and len(payload) < 1.7 * at.size


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of every kind that a version has, and of kinds that a comparison of values misses."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.zeros(40, 9)
    wide[seed] = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1, 2, 3, 4, 5])
    wide.view(torch.int32)[seed, 2] += seed  # another payload of NaN
    return {
        "layer.bf16": torch.randn(64, 8, generator=generator).bfloat16(),
        "layer.fp16": torch.randn(16, generator=generator).half(),
        "layer.fp32": wide,
        "buffer": torch.arange(2000) + seed,
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(float(seed)),
        "same": torch.ones(100, 100, dtype=torch.bfloat16),
    }


def write_version(directory: Path, seed: int) -> Path:
    directory.mkdir()
    save_file(weights(seed), directory / NAME, metadata={"format": "pt"})
    return directory


def snapshot(directory: Path) -> Snapshot:
    content = mapped(directory)
    return Snapshot(content, {name: sha256(directory / name) for name in content})


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """Versions 0 to 3: `0/model.safetensors` is full, 1.delta to 3.delta lead to the others."""
    versions = [snapshot(write_version(tmp_path / str(seed), seed)) for seed in range(4)]
    for number, (base, new) in enumerate(itertools.pairwise(versions), 1):
        with (tmp_path / f"{number}{DELTA}").open("wb") as target:
            assert write_delta(base, new.content, target) == new
    return tmp_path


def file_of(path: Path) -> WeightFile:
    return WeightFile(url=path.as_uri(), sha256=sha256(path), size_bytes=path.stat().st_size)


def manifest(chain: Path, last: int, first: int = 1) -> list[WeightFile]:
    deltas = [file_of(chain / f"{number}{DELTA}") for number in range(first, last + 1)]
    return [file_of(chain / FULL / NAME), *deltas]


def assert_equals(found: Mapping[Path, str], directory: Path) -> None:
    ((path, digest),) = found.items()
    assert path.read_bytes() == (directory / NAME).read_bytes()
    assert digest == sha256(directory / NAME)
    assert load_file(path).keys() == weights(0).keys()


@pytest.mark.parametrize("last", [1, 2, 3])
def test_a_late_reader_gets_the_bytes_of_a_full_version(chain: Path, last: int) -> None:
    assert_equals(get_files(manifest(chain, last), chain / "cache"), chain / str(last))


def test_a_reader_that_follows_needs_only_the_newest_delta(chain: Path) -> None:
    cache = chain / "cache"
    get_files(manifest(chain, 1), cache)
    files = manifest(chain, 3)
    (chain / FULL / NAME).unlink()
    (chain / f"1{DELTA}").unlink()
    assert_equals(get_files(files, cache), chain / "3")
    assert_equals(get_files(files, cache), chain / "3")  # it is there already


def test_a_damaged_version_in_the_cache_is_rebuilt_at_the_next_try(chain: Path) -> None:
    cache = chain / "cache"
    ((path, _),) = get_files(manifest(chain, 2), cache).items()
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(WeightsUnreadable, match="another sha256 than it says"):
        get_files(manifest(chain, 3), cache)
    assert_equals(get_files(manifest(chain, 3), cache), chain / "3")
    assert not list(cache.rglob("*.part"))


def test_missing_links_and_wrong_bases_are_refused(chain: Path) -> None:
    cache = chain / "cache"
    first, *deltas = manifest(chain, 3)
    with pytest.raises(WeightsUnreadable, match=r"1\.delta doesn't lead to the base of .*3\.delta"):
        get_files([first, deltas[0], deltas[2]], cache)
    with pytest.raises(WeightsUnreadable, match=r"is not the base of .*2\.delta"):
        get_files([first, *deltas[1:]], cache)
    with pytest.raises(WeightsUnreadable, match="the version has no file"):
        get_files(deltas, cache)
    (chain / f"2{DELTA}").unlink()
    with pytest.raises(WeightsUnreadable, match=r"No such file .*2\.delta"):
        get_files([first, *deltas], cache)
    assert not list(cache.rglob("*.*"))


def test_an_index_cannot_name_a_file_outside_the_cache(chain: Path) -> None:
    victim = chain / "victim" / NAME
    victim.parent.mkdir()
    victim.write_bytes(b"not a version")
    index = DeltaFile(chain / f"1{DELTA}").index
    forged = msgspec.json.encode(replace(index, base={NAME: "../victim"}))
    trailer = hashlib.sha256(forged).digest() + len(forged).to_bytes(8, "little") + MAGIC
    (chain / f"1{DELTA}").write_bytes(forged + trailer)
    with pytest.raises(WeightsUnreadable, match="regex"):
        get_files(manifest(chain, 1), chain / "cache")
    assert victim.exists()


def test_a_base_beside_the_cache_stays_when_a_delta_is_damaged(chain: Path) -> None:
    cache, path = chain / "cache", chain / f"1{DELTA}"
    cache.mkdir()
    path.write_bytes(b"?" + path.read_bytes()[1:])
    full, delta = manifest(chain, 1)
    base = replace(full, url=f"{cache}/../{FULL}/{NAME}")
    with pytest.raises(WeightsUnreadable, match="damaged"):
        get_files([base, delta], cache)
    assert (chain / FULL / NAME).exists()


@pytest.mark.slow
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_byte_or_a_lost_end_is_found_without_a_manifest(
    chain: Path, data: st.DataObject
) -> None:
    path, whole = chain / f"1{DELTA}", (chain / f"1{DELTA}").read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    wrong = bytearray(whole)
    wrong[at] ^= data.draw(st.integers(1, 255))
    for damaged in (wrong, whole[:at]):
        path.write_bytes(damaged)
        with pytest.raises(WeightsUnreadable):
            rebuild(NAME, chain / FULL / NAME, [DeltaFile(path)], io.BytesIO())
    path.write_bytes(whole)
    rebuild(NAME, chain / FULL / NAME, [DeltaFile(path)], io.BytesIO())


def test_a_delta_that_does_not_pay_or_fit_is_none(chain: Path, tmp_path: Path) -> None:
    base = snapshot(chain / FULL)
    for name, tensors in (
        ("noise", {"a": torch.randn(1000)}),
        ("layout", weights(0) | {"more": torch.zeros(1)}),
    ):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / NAME, metadata={"format": "pt"})
        assert write_delta(base, mapped(tmp_path / name), io.BytesIO()) is None
    save_file({"a": torch.randn(1000)}, chain / "noise" / NAME, metadata={"format": "pt"})
    (tmp_path / "next").mkdir()
    save_file({"a": torch.randn(1000)}, tmp_path / "next" / NAME, metadata={"format": "pt"})
    noise = snapshot(chain / "noise")
    assert write_delta(noise, mapped(tmp_path / "next"), io.BytesIO()) is None
    assert write_delta(base, {}, io.BytesIO()) is None
