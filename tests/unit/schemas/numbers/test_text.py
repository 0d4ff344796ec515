"""Numbers in text: the table decides what is read, for an answer and for the expected value."""

from __future__ import annotations

import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawstream.schemas.numbers.text import last_number_in, number_in


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("first 7, then 1,042.", 1042),
        ("It is 42", 42),
        ("答案是42。", 42),
        ("**42**", 42),
        ("_42_", 42),
        (r"\boxed{42}", 42),
        (r"x \approx42", 42),
        ("12 apples", 12),
        ("5kg", 5),
        ("the 3rd", 3),
        # signs
        ("x = −5", -5),
        ("x = -5", -5),
        ("x = - 5", -5),
        ("x=–5", -5),
        ("\uff0d5", -5),
        (r"\boxed{-5}", -5),
        ("**-5**", -5),
        ("(-5)", -5),
        ("(−.5)", "-1/2"),
        ("from 3 to -5", -5),
        ("between 3-5", 5),
        ("pages 3–5", 5),
        ("7 - 5", 5),
        ("x-5", 5),
        ("(7)-5", 5),
        ("- 5", 5),
        ("so: 5 - that is it", 5),
        ("GPT-4", 4),
        ("the answer--5", 5),
        ("-$5", -5),
        (r"-\$5.50", "-11/2"),
        ("$-5$", -5),
        ("$3-$5", 5),
        # decimals, exponents, powers
        ("p = .5", "1/2"),
        ("No.5", 5),
        ("0.50", "1/2"),
        ("It is 5.", 5),
        ("3.0", 3),
        ("$.50", "1/2"),
        ("version 1.2.3", 3),
        ("about 1.5e3", 1500),
        ("1e-1", "1/10"),
        ("1E−1", "1/10"),
        ("1.5E+3.", 1500),
        ("1.5 × 10^3", 1500),
        (r"1.5 \times 10^{-3}", "3/2000"),
        ("1.5*10**3", 1500),
        ("1.5·10³", 1500),
        ("10⁻²", "1/100"),
        ("2^{10}", 1024),
        ("2 x 5 = 10", 10),
        ("5e", 5),
        # thousands
        ("1,080", 1080),
        ("1,234,567.89", "123456789/100"),
        ("1 080 m", 80),
        ("1\u202f080", 1080),
        ("1\u00a0080", 1080),
        ("1_080", 1080),
        ("1'080", 1080),
        (r"1{,}080", 1080),
        (r"1\,080", 1080),
        ("The roots are (1,2)", 2),
        ("0,1", 1),
        ("1,2345", 2345),
        ("1234,567", 567),
        ("1,234,56", 56),
        ("1, 2, 3", 3),
        ("3,14,", 14),
        # fractions and percent
        ("It is 3/4.", "3/4"),
        ("-1/2", "-1/2"),
        ("1 1/2 cups", "3/2"),
        (r"\frac{3}{4}", "3/4"),
        (r"-\dfrac{1}{2}", "-1/2"),
        (r"\frac{-1}{2}", "-1/2"),
        (r"\frac12", "1/2"),
        (r"1\frac{1}{2}", "3/2"),
        ("½", "1/2"),
        ("1½", "3/2"),
        ("on 1/2/2024", 2024),
        ("60 km/h", 60),
        ("50%", 50),
        (r"50 \%", 50),
        # no numbers: names and exponents of units
        ("25 m^2", 25),
        (r"25\,\text{cm}^{2}", 25),
        ("25 m²", 25),
        ("42 kg of CO2", 42),
        ("7 = x_1", 7),
        ("7 = x_{12}", 7),
        (r"90^\circ", 90),
        ("121932631112635268", 121932631112635268),
    ],
)  # fmt: skip
def test_the_last_number_of_a_text(text: str, value: int | str) -> None:
    found = last_number_in(text)
    assert found is not None and found.value == Fraction(value)


@pytest.mark.parametrize("text", ["", "none", "x1", "CO2", "m^2", "-", ".", "1"[:0], r"\pi"])
def test_a_text_without_a_number(text: str) -> None:
    assert last_number_in(text) is None


@pytest.mark.parametrize("text", ["9" * 5000, "1e999999999", "10^999999999", "3/0", "0^-1"])
def test_a_number_that_is_too_long_equals_nothing(text: str) -> None:
    found = last_number_in(text)
    assert found is not None and found.value is None and not found.equals(found)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (42, 42),
        (3.0, 3),
        (0.1, "1/10"),
        (Decimal("1.50"), "3/2"),
        ("1,080", 1080),
        (" $18. ", 18),
        ("#### 18", 18),
        (r"\boxed{\frac{3}{4}}", "3/4"),
        ("−5", -5),
        ("50%", 50),
        ("1.5e3", 1500),
    ],
)
def test_a_value_that_is_a_number(value: object, expected: int | str) -> None:
    assert number_in(value).value == Fraction(expected)


@pytest.mark.parametrize(
    "value",
    ["", "many", "nan", "inf", "3-5", "(1,2)", "x = 5", r"\sqrt{2}", "2 of 3", "9" * 5000,
     True, None, [1], {"a": 1}, float("nan"), float("inf"), Decimal("1e999999999")],
)  # fmt: skip
def test_a_value_that_is_no_number(value: object) -> None:
    with pytest.raises(ValueError):
        number_in(value)


@pytest.mark.parametrize(
    ("one", "other", "is_equal"),
    [
        ("50%", "50%", True),
        ("50%", "50", True),
        ("50%", "0.5", True),
        ("50%", "0.5%", False),
        ("50", "0.5", False),
        ("3/4", "0.75", True),
        ("1/3", "0.333", False),
        ("121932631112635268", "121932631112635269", False),
    ],
)
def test_equal_numbers(one: str, other: str, is_equal: bool) -> None:
    assert number_in(one).equals(number_in(other)) is is_equal
    assert number_in(other).equals(number_in(one)) is is_equal


@settings(max_examples=30)
@given(st.decimals(allow_nan=False, allow_infinity=False, places=6) | st.integers())
def test_both_sides_read_what_python_writes(value: Decimal | int) -> None:
    said = last_number_in(f"So it is {value}.")
    assert said is not None and said.equals(number_in(value)) and said.value == Fraction(value)
    assert last_number_in(f"= {value:,}") == said


@settings(max_examples=50)
@given(st.text(alphabet="0123456789,._-−eE^/ x(){}\\frac%½¹$"))
def test_no_text_is_an_error(text: str) -> None:
    last_number_in(text)


@pytest.mark.parametrize("text", ["1,000", "1,00", "1 ", "1/", "x_{", "1.", "e", "1^", "111,111,1"])
def test_the_work_grows_with_the_text(text: str) -> None:
    def cpu_s(repeated: int) -> float:
        began = time.process_time()
        last_number_in(text * repeated)
        return time.process_time() - began

    assert min(cpu_s(2400) for _ in range(3)) < 30 * min(cpu_s(300) for _ in range(3)) + 0.01
