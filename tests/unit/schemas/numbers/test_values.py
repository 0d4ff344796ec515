"""What is a number, for reward functions and flows."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from clawstream.schemas.numbers.values import number_of


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (3, 3),
        (0.5, 0.5),
        (True, 1),
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.int64(3), 3),
        (np.uint8(3), 3),
        (np.bool_(False), 0),
        (np.array(0.5), 0.5),
        (np.array([0.5], dtype=np.float32), 0.5),
        (np.array([[2]]), 2),
        (Decimal("0.5"), 0.5),
        (Fraction(1, 2), 0.5),
    ],
)
def test_numbers_of_any_library(value: Any, number: float) -> None:
    found = number_of(value)
    assert found == number and type(found) in (bool, int, float)


@pytest.mark.parametrize(
    "value",
    [None, "1", b"1", "", [], [1.0], (1,), {"a": 1}, {1}, 1j, np.str_("1"), np.bytes_(b"1"),
     np.complex64(1), np.array([]), np.array([1.0, 2.0]), np.array(["1"]),
     np.datetime64("2024-01-01"), object(), float],
)  # fmt: skip
def test_all_else_is_no_number(value: Any) -> None:
    with pytest.raises(TypeError):
        number_of(value)


def test_a_tensor_of_one_element_is_a_number() -> None:
    torch = pytest.importorskip("torch")
    assert number_of(torch.tensor(0.5)) == number_of(torch.tensor([0.5])) == 0.5
    assert number_of(torch.tensor([True])) is True
    with pytest.raises(TypeError):
        number_of(torch.tensor([0.5, 0.5]))
