"""Redaction rules, one per type of secret. Pure.

A rule has anchors, strings of which every secret of its type has at least one nearby, and a
function that searches around an anchor. Anchors are searched in the normal form of the text:
lower-case ASCII letters, every digit `0`. All patterns start at an anchor and have bounded or
possessive repeats, so the work is linear in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from clawstream.gateway.redaction import checks

Span = tuple[int, int]
Find = Callable[[bytes, int], Span | None]
"""Maps a text and the position of an anchor to the span of the secret."""

NORMAL = bytes(
    ord("0")
    if chr(b).isascii() and chr(b).isdigit()
    else b + 32
    if ord("A") <= b <= ord("Z")
    else b
    for b in range(256)
)
"""Table for bytes.translate: the normal form; positions stay the same."""


def _not_behind(characters: bytes) -> bytes:
    """Return a pattern for a position not preceded by the characters.

    Characters of a JSON escape do not count, because texts contain JSON.
    """
    return rb"(?:(?<![" + characters + rb"])|(?<=\\[nrt])|(?<=\\u[0-9A-Fa-f]{4}))"


_START = _not_behind(rb"\w-")
_NOT_DIGITS = bytes(b for b in range(256) if b not in b"0123456789")


@dataclass(frozen=True, slots=True)
class Rule:
    """A redaction rule.

    Attributes:
        name: Name in the settings; in capitals, the label of the replacement.
        anchors: Anchors in normal form.
        same: Canonical form of a secret, equal for all spellings of one secret.
        key: Tells from (member name, value, whether it is a string) whether the whole value of a
            JSON member is a secret.
        in_json: Tells whether an anchor in escaped JSON may belong to a secret; None means yes. It
            saves decoding most texts with an anchor. False positives are harmless, false negatives
            are not.
    """

    name: str
    anchors: tuple[bytes, ...]
    find: Find
    same: Callable[[bytes], bytes] = bytes
    key: Callable[[bytes, bytes, bool], bool] | None = None
    in_json: Callable[[bytes, int], object] | None = None


def _plain(
    name: str, anchors: tuple[bytes, ...], find: Find, same: Callable[[bytes], bytes] = bytes
) -> Rule:
    """Build a rule for secrets that JSON writes unescaped, or as `\\u00..`, an anchor itself."""
    return Rule(name, anchors, find, same, in_json=find)


def _maybe(pattern: bytes) -> Callable[[bytes, int], object]:
    return re.compile(pattern).match


def _at(pattern: bytes, check: Callable[[bytes], bool] | None = None) -> Find:
    """Match a pattern at the anchor; the secret is its group `v`, or the whole match."""
    compiled = re.compile(pattern)
    group = compiled.groupindex.get("v", 0)

    def find(text: bytes, at: int) -> Span | None:
        found = compiled.match(text, at)
        return found.span(group) if found and (check is None or check(found[group])) else None

    return find


def _digits(value: bytes) -> bytes:
    return value.translate(None, _NOT_DIGITS)


def _has_digit(value: bytes) -> bool:
    return any(48 <= b < 58 for b in value)


# -- personal data

_LOCAL = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._%+-"
_DOMAIN = re.compile(rb"@((?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,62})\.){1,8}([A-Za-z]{2,24}))")
_FILES = frozenset(
    (b"png", b"jpg", b"jpeg", b"gif", b"svg", b"webp", b"css", b"js", b"py", b"so", b"service")
)
_LOGIN = re.compile(rb":\\{0,15}/\\{0,15}/[^\s/\\]{0,130}[:@]\Z")


def _email(text: bytes, at: int) -> Span | None:
    domain = _DOMAIN.match(text, at)
    if domain is None or domain[2].lower() in _FILES:
        return None
    before = text[max(0, at - 64) : at]
    local = before[len(before.rstrip(_LOCAL)) :]
    start = at - len(local)
    if text[start - 1 : start] == b"\\" and local[:1] in b"nrt":  # a JSON escape
        local = local[1:]
    local = local.lstrip(b"._%+-")
    start = at - len(local)
    if not local or local.lower() == b"git" or _LOGIN.search(text, max(0, start - 140), start):
        return None
    return start, domain.end()


def _card(value: bytes) -> bool:
    return checks.card(_digits(value))


_IBAN = re.compile(_not_behind(rb"A-Za-z0-9") + rb"[A-Za-z]{2}[0-9]{2}(?:[ -]?[A-Za-z0-9]){11,30}")
_COUNTRY = re.compile(rb"[A-Za-z]{2}[0-9]{2}")
_IBAN_BACK, _IBAN_AHEAD = 30, 44


def _iban(text: bytes, at: int) -> Span | None:
    if text[at - 1 : at].isdigit():
        return None  # the anchor at the start of these digits was tried
    first, last = max(0, at - _IBAN_BACK), at + _IBAN_AHEAD
    for found in _COUNTRY.finditer(text, first, last):
        start = found.start()
        if checks.iban_length(text[start : start + 2]) and _IBAN.match(text, start, last):
            end = start + checks.iban_end(text[start:last])
            if end > at:  # otherwise none, or one before this anchor
                return start, end
    return None


_IPV4 = re.compile(_not_behind(rb"\w.") + rb"[0-9]{1,3}(?:\.[0-9]{1,3}){3}(?![\w]|\.[0-9])")


def _ipv4(text: bytes, at: int) -> Span | None:
    found = _IPV4.search(text, max(0, at - 2), at + 16)
    return found.span() if found and found.start() <= at and checks.public_ipv4(found[0]) else None


# -- credentials

_PREFIXES = (
    rb"sk-", rb"gh[pousr]_", rb"github_pat_", rb"gl(?:pat|ptt|rt|dt)-", rb"xox[abeoprs]-",
    rb"xapp-", rb"AIza", rb"ya29\.", rb"GOCSPX-",
    rb"[sr]k_(?:live|test)_", rb"whsec_", rb"hf_", rb"npm_", rb"pypi-", rb"SG\.", rb"do[opr]_v1_",
    rb"shp(?:at|ss|ca|pa)_", rb"gsk_", rb"xai-",
    rb"r8_", rb"nvapi-", rb"tvly-", rb"pplx-", rb"lin_api_", rb"ntn_", rb"hvs\.", rb"dapi",
    rb"ATATT3", rb"AGE-SECRET-KEY-1", rb"claw-(?=[\w-]{40})",
)  # fmt: skip
_PREFIX_ANCHORS = (
    b"sk-", b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_", b"github_pat_", b"glpat-", b"glptt-",
    b"glrt-", b"gldt-", b"xox", b"xapp-",
    b"aiza", b"ya00.", b"gocspx-", b"sk_live_", b"sk_test_", b"rk_live_", b"rk_test_", b"whsec_",
    b"hf_", b"npm_", b"pypi-", b"sg.",
    b"doo_v0_", b"dop_v0_", b"dor_v0_", b"shpat_", b"shpss_", b"shpca_", b"shppa_", b"gsk_",
    b"xai-", b"r0_", b"nvapi-", b"tvly-", b"pplx-",
    b"lin_api_", b"ntn_", b"hvs.", b"dapi", b"atatt0", b"age-secret-key-0", b"claw-",
)  # fmt: skip
_API_KEY = _at(
    _START + rb"(?:" + b"|".join(_PREFIXES) + rb")[\w-]{16,}+(?:\.[\w-]{8,}+)*+", _has_digit
)
_AWS_ID = rb"A(?:KIA|SIA|BIA|CCA)[A-Z0-9]{16}(?![A-Za-z0-9])"

_GAP = rb"(?:\s|\\++[nrt])*+"
_PEM = (
    rb"-----BEGIN (?:[A-Z0-9]+ ){0,4}PRIVATE KEY(?: BLOCK)?-----"
    rb"(?:" + _GAP + rb"[A-Z][A-Za-z-]{2,20}+: [^\n\\\x00]{0,200}+)*+"
    rb"(?:" + _GAP + rb"[A-Za-z0-9+/=]{16,}+)++"
    rb"(?:" + _GAP + rb"=?[A-Za-z0-9+/=]{1,15}+(?=" + _GAP + rb"(?:-----END|\Z)))*+"
    rb"(?:" + _GAP + rb"-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----)?+"
)  # fmt: skip

_URL_LOGIN = re.compile(
    rb":\\{0,15}/\\{0,15}/([^\s/?#\"'<>\\\x00@:]{0,64}:([^\s/?#\"'<>\\\x00]{1,256}))@"
)


def _url_login(text: bytes, at: int) -> Span | None:
    found = _URL_LOGIN.match(text, at)
    return (
        found.span(1)
        if found and not checks.placeholder(found[2]) and not checks.placeholder(found[1])
        else None
    )


_WORD = (
    rb"(pass(?:word|wd|phrase)|pwd|secret|token|api[_-]?key|access[_-]?key|private[_-]?key"
    rb"|account[_-]?key|auth[_-]?key|credentials?)"
)
_SUFFIX = (
    rb"(?:[_-]?(?:access|account|api|auth|key|secret|token|value|hash|base64|b64)){0,3}[0-9]{0,2}"
)
_ASSIGNED = re.compile(
    rb"(?i:" + _WORD + _SUFFIX + rb"(?:\\{0,7}[\"'])?[`*\])]{0,3}[ \t]{0,8}"
    rb"(?::=|=>|=(?!=)|:(?!:)|is\b|was\b)[`*]{0,3}[ \t]{0,8})"
    rb"(?:\\{1,7}\"([^\"\\\n\x00]{1,512})\\{1,7}\"|\"((?:[^\"\\\n\x00]|\\[^\n\x00]){1,512})\""
    rb"|'([^'\\\n\x00]{1,512})'"
    rb"|`([^`\\\n\x00]{1,512})`|([^\s\"'`\\,;&<>(){}\[\]\x00]{6,512}))"
)  # fmt: skip
_ASSIGNING = (
    rb"(?i:" + _WORD + _SUFFIX + rb")(?:\\*+\"\s*+:"
    rb"|(?:\\*+[\"'])?[`*\])]{0,3}(?: |\\*t|\t){0,8}(?i::|=|is\b|was\b))"
)  # fmt: skip
_NAME = re.compile(rb"(?i:" + _WORD + _SUFFIX + rb")\Z")
_LABEL = re.compile(rb"\[REDACTED:[A-Z_]*\Z")
_UNQUOTED = 6
_CALLED = (b"(", b"[")


def _given(word: bytes, value: bytes, quoted: bool) -> bool:
    """Tell whether the value of a field with this word in its name is a secret."""
    word = word.lower()
    if word.startswith((b"pass", b"pwd")) or (
        word == b"secret" and (_has_digit(value) or not quoted)
    ):
        return checks.password(value, quoted) or checks.token(value)
    return checks.token(value)


def _secret(text: bytes, at: int) -> Span | None:
    found = _ASSIGNED.match(text, at)
    if found is None or found.lastindex is None or _LABEL.search(text, max(0, at - 32), at):
        return None
    start, end = found.span(found.lastindex)
    quoted = found.lastindex != _UNQUOTED
    if not quoted:
        if text[end : end + 1] in _CALLED:
            return None
        end = start + len(text[start:end].rstrip(b".?:*"))
    return (start, end) if _given(found[1], text[start:end], quoted) else None


def _secret_member(name: bytes, value: bytes, quoted: bool) -> bool:
    word = _NAME.search(name[-80:])
    return (
        word is not None
        and len(value) <= 512
        and b"\n" not in value
        and _given(word[1], value, quoted)
    )


_SEPARATORS = tuple(bytes([c]) for c in b"\"':= \\`*")
_SECRET_ANCHORS = (
    b"password", b"passwd", b"passphrase", b"pwd", b"secret", b"apikey", b"api_key", b"api-key",
    b"accesskey", b"access_key", b"access-key",
    b"privatekey", b"private_key", b"private-key", b"accountkey", b"account_key", b"authkey",
    b"auth_key", b"auth-key", b"credential",
    *(b"token" + s for s in _SEPARATORS),  # not `tokens`: most requests have max_tokens
)  # fmt: skip

RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("private_key", (b"-----begin ",), _at(_PEM)),
        Rule("url_login", (b"://", b":\\"), _url_login,
            in_json=_maybe(rb":\\*+/\\*+/[^\s/?#\"'<>\x00]{1,2000}@")),
        Rule("aws_secret", (b"akia", b"asia", b"abia", b"acca"),
            _at(_START + _AWS_ID + rb"[^A-Za-z0-9+/\x00]{1,12}"
                rb"(?P<v>[A-Za-z0-9+/]{40})(?![A-Za-z0-9+/=])")),
        _plain("aws_key", (b"akia", b"asia", b"abia", b"acca"), _at(_START + _AWS_ID)),
        _plain("api_key", _PREFIX_ANCHORS, _API_KEY),
        _plain("jwt", (b"eyj",), _at(_START + rb"eyJ[\w-]{8,}+\.[\w-]{8,}+(?:\.[\w-]*+)?")),
        Rule("bearer", (b"bearer ", b"basic "),
            _at(rb"(?i:bearer|basic)[ ]{1,4}(?P<v>[A-Za-z0-9._~+/-]{16,}+=*+)", _has_digit)),
        Rule("secret", _SECRET_ANCHORS, _secret, key=_secret_member, in_json=_maybe(_ASSIGNING)),
        _plain("email", (b"@",), _email, bytes.lower),
        # Without in_json: the match depends on up to 30 bytes before, which may contain escapes.
        Rule("iban", (b"00000000", b"0000 0000", b"0000-0000"), _iban,
            lambda v: v.translate(None, b" -").upper()),
        _plain(
            "card",
            (b"0000 0000 0000", b"0000-0000-0000", b"0000 000000 0", b"0000-000000-0", b"0" * 14),
            _at(_not_behind(rb"\w.+-")
                + rb"(?:[2-6][0-9]{3}([ -])[0-9]{4}\1[0-9]{4}\1[0-9]{4}(?:\1[0-9]{3})?"
                rb"|3[0-9]{3}([ -])[0-9]{6}\2[0-9]{4,5}"
                rb"|[2-6][0-9]{13,18})(?![\w-]|\.[0-9])", _card),
            _digits,
        ),
        _plain("ssn", (b"000-00-0000",),
            _at(_not_behind(rb"\w-")
                + rb"(?!000|666|9)[0-9]{3}-(?!00)[0-9]{2}-(?!0000)[0-9]{4}(?![\w-])")),
        Rule("phone", (b"+0",),
            _at(_not_behind(rb"\w+/.-") + rb"\+[1-9](?:[ .()/-]{0,2}[0-9]){7,14}(?![0-9A-Za-z])"),
            _digits),
        Rule("ipv4", (b"0.0",), _ipv4),
    )
}  # fmt: skip
"""Rules by name; of two overlapping matches, the earlier rule gives the label."""
