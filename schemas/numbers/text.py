"""Read numbers in text, in the same way on both sides of a comparison. Pure.

Values are exact (`Fraction`), so integers of any size differ where their digits differ. Read are:

- signs, also U+2212, where they are no hyphen, range or subtraction: `3-5` is 3 and 5
- thousands separators between groups of three digits: `1,080`, `1_080`, `1{,}080`, thin spaces
- decimals (`0.5`, `.5`), exponents (`1.5e3`, `1.5 x 10^3`), powers (`2^10`)
- fractions (`3/4`, `1 1/2`, `\\frac{3}{4}`, a vulgar fraction), but not dates such as `1/2/2024`

A currency sign changes nothing. Digits of a name (`x1`, `H2O`) and exponents of a unit (`m^2`) are
no numbers.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from clawstream.schemas.numbers.values import number_of

DIGITS_MAX = 1000
"""Of a number, and the size of its exponent: a longer one is a number, but equals none."""

_MINUS = "-\u2212\u2013\uff0d"
_TO_HYPHEN = dict.fromkeys(map(ord, _MINUS), "-")
_SIGNS = _MINUS + "+"
_BEFORE_LONE_SIGN = "=\u2248<>\u2264\u2265({["
"""What stands before a sign that a space separates from its number; else it is a dash."""
_CURRENCIES = "$\u20ac\u00a3\u00a5\u20b9"
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_VULGAR = "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"

_TOKEN = re.compile(
    rf"""
    (?P<other>
        \\(?![dtc]?frac)[A-Za-z]+                       # a command of LaTeX
      | [A-Za-z][A-Za-z0-9_]*(?:(?<=_)\{{[^{{}}\n]{{0,40}}\}})?   # a name
      | \^\{{?[{_SIGNS}]?\d{{1,9}}\}}?                  # the exponent of a name or a bracket
    )
  | (?:
        (?:(?P<whole>\d{{1,30}})[ ]?)?
        \\[dtc]?frac(?:
            \{{(?P<top_sign>[{_MINUS}]?)(?P<top>\d{{1,30}})\}}\{{(?P<below>\d{{1,30}})\}}
          | (?P<top_digit>\d)(?P<below_digit>\d))
      | (?:(?P<whole_of_slash>\d{{1,30}})[ ])?
        (?<![/\d.])(?P<over>\d{{1,30}})/(?P<under>\d{{1,30}})(?!\d|[/.,]\d|[A-Za-z])
      | (?P<whole_of_vulgar>\d{{1,30}})?[ ]?(?P<vulgar>[{_VULGAR}])
      | (?P<digits>
            [1-9]\d{{0,2}}(?P<separator>,|\{{,\}}|\\,|[_'’\u00a0\u2009\u202f])
            \d{{3}}(?:(?P=separator)\d{{3}}){{0,40}}+(?!\d|(?P=separator)\d)
            (?:\.\d++)?
          | \d++(?:\.\d++)?
          | (?<![A-Za-z0-9_.)\]}}])\.\d++
        )
        (?:[eE](?P<e>[{_SIGNS}]?\d{{1,9}})(?![A-Za-z0-9]))?
        (?P<times>[ ]?(?:[×x*·⋅]|\\times|\\cdot)[ ]?10(?=\^|\*\*|[⁰-⁹⁺⁻¹²³]))?
        (?:
            (?:\^|\*\*)\{{?(?P<power>[{_SIGNS}]?\d{{1,9}})(?!\d)\}}?
          | (?P<superscript>[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]{{1,9}})
        )?
    )
    (?P<percent>[ ]?\\?%)?
    """,
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Number:
    """A number that a text says.

    Attributes:
        value: Without the percent sign; None: too long to be read, so it equals nothing.
        is_percent: Whether a percent sign follows it.
    """

    value: Fraction | None
    is_percent: bool = False

    def equals(self, other: Number) -> bool:
        """Return whether both are the same number.

        If only one has a percent sign, 50% equals both 50 and 0.5.
        """
        if self.value is None or other.value is None:
            return False
        if self.value == other.value:
            return True
        if self.is_percent == other.is_percent:
            return False
        share, plain = (self, other) if self.is_percent else (other, self)
        return share.value / 100 == plain.value  # type: ignore[operator]


def last_number_in(text: str) -> Number | None:
    """Return the last number in a text; None without any."""
    last = None
    for token in _TOKEN.finditer(text):
        if token["other"] is None:
            last = token
    return None if last is None else _number(text, last)


def number_in(value: object) -> Number:
    """Return the number that a value is, or that a text is as a whole.

    A currency or percent sign, white space, a full stop, `\\boxed` and the `####` of GSM8K may
    stand around it.

    Raises:
        ValueError: It is no number, or more than one.
    """
    if isinstance(value, bool):
        raise ValueError(f"{value} is no number")
    try:
        text = str(value if isinstance(value, str | Decimal) else number_of(value))
    except TypeError as e:
        raise ValueError(f"a number is expected, not {e}") from e
    found = [
        token for token in _TOKEN.finditer(text) if token["other"] not in ("\\boxed", "\\text")
    ]
    if len(found) == 1 and found[0]["other"] is None:
        start, end = found[0].span()
        around = (text[:start] + text[end:]).replace("\\boxed", "").replace("\\text", "")
        if not around.strip(f" \t\r\n#*${{}}().=\\{_CURRENCIES}{_SIGNS}"):
            number = _number(text, found[0])
            if number.value is not None:
                return number
    raise ValueError(f"no single number: {text:.80}")


def _number(text: str, token: re.Match[str]) -> Number:
    value = _value(token)
    if value is not None and _is_negative(text, token.start()):
        value = -value
    return Number(value, token["percent"] is not None)


def _is_negative(text: str, start: int) -> bool:
    """Return whether a minus belongs to the number that begins at `start`."""
    at = start - 1
    while at >= 0 and (text[at] in _CURRENCIES or (text[at] == "\\" and at + 1 < start)):
        at -= 1
    is_apart = False
    while at >= 0 and text[at] in " \t":
        at, is_apart = at - 1, True
    if at < 0 or text[at] not in _MINUS:
        return False
    before = text[:at][-8:]
    if is_apart:
        return before.rstrip(" \t")[-1:] in tuple(_BEFORE_LONE_SIGN)
    last = before[-1:]
    return not (last.isascii() and last.isalnum()) and (not last or last not in ")]}%" + _MINUS)


def _value(token: re.Match[str]) -> Fraction | None:
    """Return the value of a number without its sign; None where it is too long."""
    if (below := token["below"] or token["below_digit"]) is not None:
        top = int(token["top"] or token["top_digit"])
        return _mixed(token["whole"], -top if token["top_sign"] else top, int(below))
    if token["under"] is not None:
        return _mixed(token["whole_of_slash"], int(token["over"]), int(token["under"]))
    if token["vulgar"] is not None:
        part = Fraction(unicodedata.numeric(token["vulgar"])).limit_denominator(10)
        return int(token["whole_of_vulgar"] or 0) + part
    digits = token["digits"]
    if token["separator"] is not None:
        digits = digits.replace(token["separator"], "")
    if len(digits) > DIGITS_MAX:
        return None
    value, tens = Fraction(digits), _integer(token["e"] or "0")
    power = _integer(token["power"] or (token["superscript"] or "").translate(_SUPERSCRIPTS) or "1")
    base = value
    if token["times"] is not None:
        tens, power = tens + power, 1
    if abs(tens) > DIGITS_MAX or abs(power) * len(digits) > DIGITS_MAX or not (base or power >= 0):
        return None
    return (base * Fraction(10) ** tens) ** power


def _mixed(whole: str | None, top: int, below: int) -> Fraction | None:
    return int(whole or 0) + Fraction(top, below) if below else None


def _integer(text: str) -> int:
    return int(text.translate(_TO_HYPHEN))
