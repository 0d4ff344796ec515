"""Headers of safetensors files."""

from __future__ import annotations

import io

import pytest
import torch
from safetensors.torch import load, save

from clawstream.runtime.weights.tensor_file import LENGTH_BYTES, read_header, with_sorted_header

TENSORS = {
    "b": torch.arange(3.0),
    "a": torch.ones(2, 2, dtype=torch.bfloat16),
    "none": torch.ones(0),
}


def header(fields: bytes) -> bytes:
    return len(fields).to_bytes(LENGTH_BYTES, "little") + fields


@pytest.mark.parametrize("metadata", [{"format": "pt", "base": "ü"}, {"base": "ü", "format": "pt"}])
def test_the_same_tensors_and_metadata_are_the_same_bytes(metadata: dict[str, str]) -> None:
    found = with_sorted_header(save(TENSORS, metadata))
    assert found == with_sorted_header(save(TENSORS, {"base": "ü", "format": "pt"}))
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in load(found).items())
    start, slices = read_header(io.BytesIO(found))
    assert {part.name for part in slices} == TENSORS.keys() and len(start) % 8 == 0


def test_the_order_of_the_library_does_not_matter() -> None:
    one, other = (
        header(b'{"__metadata__":{%s},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}' % order)
        for order in (b'"x":"1","y":"2"', b'"y":"2","x":"1"')
    )
    assert with_sorted_header(one + b"7") == with_sorted_header(other + b"7")
