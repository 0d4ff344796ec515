"""Checks that distinguish secrets from similar text. Pure; values are UTF-8 bytes."""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import cache

from stdnum import luhn, numdb
from stdnum.iso7064 import mod_97_10

_PLACEHOLDER = re.compile(
    rb"(?i)(?:x+|\*+|[._-]+|<.*|\$.*|\{.*|%.*|\[redacted.*"
    rb"|(?:your|my|the|a|an|new|old|some|any|test|fake|dummy|sample|user|client|db|root|admin)?"
    rb"[ _-]?"
    rb"(?:pass|password|passwd|pwd|secret|token"
    rb"|api[_-]?key|key|credentials?)s?[ _-]?(?:here|goes here|value)?[0-9]?"
    rb"|string|str|none|null|nil|true|false|undefined|required|optional|changeme|example.*|placeholder.*|todo"
    rb"|(?:os\.environ|process\.env|getenv|env\.|self\.|config\.|settings\.|args\.|request\.|this\.).*)",
    re.S,
)
_TOKEN = re.compile(rb"[A-Za-z0-9+/=_.~:-]{12,}")
_DOTTED_NAME = re.compile(rb"[A-Za-z_]\w{0,20}(?:\.[A-Za-z_]\w{0,20})+")
_DIGIT = re.compile(rb"[0-9]")
_LETTER = re.compile(rb"[A-Za-z]")
_SYMBOL = re.compile(rb"[0-9!@#$%^*?~+|]")
_BLANK = re.compile(rb"\s")
TOKEN_BITS = 2.7
"""Minimum Shannon entropy of a random token, in bits per character.

Nine out of ten strings of 12 random hex digits have at least 2.8.
"""


_LETTERS_AND_DIGITS = frozenset(b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")


def card(digits: bytes) -> bool:
    """Tell whether digits are a payment card number: issuer prefix, length and check digit."""
    n, two, three, four = len(digits), int(digits[:2]), int(digits[:3]), int(digits[:4])
    issued = (
        (digits[:1] == b"4" and n in (16, 19))
        or (n == 16 and (51 <= two <= 55 or 2221 <= four <= 2720))
        or (n == 15 and two in (34, 37))
        or (
            16 <= n <= 19
            and (four == 6011 or two in (62, 65) or 644 <= three <= 649 or 3528 <= four <= 3589)
        )
        or (14 <= n <= 19 and (300 <= three <= 305 or two in (36, 38, 39)))
    )
    return issued and luhn.is_valid(digits.decode())


@cache
def iban_length(country: bytes) -> int:
    """Return the characters of a country's IBANs, without spaces; 0: the country has none."""
    code = country.upper().decode("ascii")
    structure = numdb.get("iban").info(code)[0][1].get("bban")  # e.g. 4!a6!n8!n
    return 0 if structure is None else 4 + sum(map(int, re.findall(r"([0-9]+)!", structure)))


def iban_end(text: bytes) -> int:
    """Return the length of the IBAN at the start of `text`, including spaces and dashes.

    Returns 0 when there is none (ISO 13616, mod 97).
    """
    wanted = iban_length(text[:2])
    plain = bytearray()
    for at, char in enumerate(text):
        if char in b" -":
            continue
        if char not in _LETTERS_AND_DIGITS:
            return 0
        plain.append(char)
        if len(plain) == wanted:
            end = at + 1
            rotated = (plain[4:] + plain[:4]).decode("ascii")
            whole = not text[end : end + 1].isalnum()
            return end if whole and mod_97_10.is_valid(rotated) else 0
    return 0


def entropy(value: bytes) -> float:
    """Return the Shannon entropy of a value, in bits per byte."""
    n = len(value)
    return -sum(c / n * math.log2(c / n) for c in Counter(value).values())


def placeholder(value: bytes) -> bool:
    """Tell whether a value is a placeholder: `<token>`, `$TOKEN`, `null`, or a replacement."""
    return _PLACEHOLDER.fullmatch(value) is not None


def password(value: bytes, quoted: bool) -> bool:
    """Tell whether the value of a password field is a password, not prose or code."""
    if quoted:
        likely = len(value) >= 4 and (
            _BLANK.search(value) is None or _DIGIT.search(value) is not None
        )
    else:
        likely = len(value) >= 6 and value[:1] not in b"/." and _SYMBOL.search(value) is not None
        likely = likely and _DOTTED_NAME.fullmatch(value) is None
    return likely and not placeholder(value)


def token(value: bytes) -> bool:
    """Tell whether the value of a key field is a token: random, at least 12 characters."""
    return (
        _DIGIT.search(value) is not None
        and _LETTER.search(value) is not None
        and _TOKEN.fullmatch(value) is not None
        and _DOTTED_NAME.fullmatch(value) is None
        and not placeholder(value)
        and entropy(value) >= TOKEN_BITS
    )


def public_ipv4(value: bytes) -> bool:
    """Tell whether an IPv4 address is public (not private, loopback, link-local, multicast)."""
    parts = [int(p) for p in value.split(b".")]
    if max(parts) > 255 or parts[0] in (0, 10, 127) or parts[0] >= 224:
        return False
    return not (
        parts[:2] in ([192, 168], [169, 254])
        or (parts[0] == 172 and 16 <= parts[1] <= 31)
        or (parts[0] == 100 and 64 <= parts[1] <= 127)
    )
