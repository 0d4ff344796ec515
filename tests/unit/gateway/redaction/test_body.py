"""Redacted bodies stay valid JSON; bytes without secrets stay unchanged."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from clawstream.gateway.redaction.body import redacted_body
from clawstream.gateway.redaction.rules import RULES
from clawstream.gateway.redaction.scan import NamedFinder, Scan

SCAN = Scan(list(RULES.values()), b"key", "plain")
EMAIL = "[REDACTED:EMAIL]"

unicode = st.text(alphabet=st.characters(codec="utf-8"), max_size=12)
secrets = st.sampled_from(
    [
        "joe@example.com",
        "4111 1111 1111 1111",
        "sk-proj-abcDEF0123456789abcDEF",
        "password is hunter22",
        "+49 30 1234567",
    ]
)
texts = unicode | st.tuples(unicode, secrets, unicode).map(" ".join)
names = st.sampled_from(["content", "password", "api_key", "token", "model"]) | texts
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(names, inner, max_size=4)
        | inner.map(json.dumps)
    ),
    max_leaves=12,
)


def redacted(value: Any) -> Any:
    return json.loads(redacted_body(json.dumps(value).encode(), SCAN))


def hides(name: str) -> bool:
    """Whether any string under this name is a secret, be it JSON or not."""
    member = {name: "hunter22hunter22"}
    return bool(list(redacted(member).values()) != list(member.values()))


def shape(value: Any) -> Any:
    """Return what redaction must keep: structure, names without secrets, JSON in strings."""
    if isinstance(value, dict):
        return [
            (
                SCAN.text(k.encode("utf-8", "surrogatepass")),
                "text" if isinstance(v, str) and hides(k) else shape(v),
            )
            for k, v in value.items()
        ]
    if isinstance(value, list):
        return [shape(v) for v in value]
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return shape(orjson.loads(value))
        except ValueError:
            return "text"
    return "text" if isinstance(value, str | int) and not isinstance(value, bool) else value


@pytest.mark.parametrize("ascii_only", [True, False])
@given(value=values)
def test_the_shape_stays(ascii_only: bool, value: Any) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    new = redacted_body(raw, SCAN)
    said = json.loads(new)
    assert shape(said) == shape(value)
    again = redacted_body(new, SCAN)
    assert json.loads(again) == said


def test_a_password_that_is_json_is_still_a_password() -> None:
    said = redacted({"password": "[null]", "other": "[null]"})
    assert said["password"].startswith("[REDACTED") and said["other"] == "[null]"


pieces = st.sampled_from(
    ["joe@example.com", "git@host.com", "http://", "http:\\/\\/", "joe:s3cret@", "é:p@",
    "4111 1111 1111 1111", "DE89370400440532013000", "123-45-6789",
     "+49 30/1234567", "sk-proj-abcDEF0123456789abcDEF", "AKIAIOSFODNN7EXAMPLE",
     ",wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0",
     "Bearer ", "abcdef/0123456789ab", "password", "token", "api_key", "_secret", '"', "'", "`",
     ":", "=", " is ", "**", "\\", "hunter22!", "abc123def456ghi",
     "-----BEGIN PRIVATE KEY-----", "MIIEpAIBAAKCAQEA12", "\n", "\t", " ", "/", "é", "中", "\x01",
     "a", "0", ".", "-", "\u2028"]
)  # fmt: skip


@given(st.lists(pieces, max_size=10).map("".join) | unicode, st.booleans(), st.booleans())
@settings(max_examples=examples(400))
def test_a_string_says_what_its_text_would(text: str, ascii_only: bool, slashes: bool) -> None:
    """No escape sequence of JSON hides a secret of a string."""
    raw = json.dumps([text], ensure_ascii=ascii_only)
    if slashes:
        raw = raw.replace("/", "\\/")
    if text.lstrip()[:1] not in ("{", "["):
        assert json.loads(redacted_body(raw.encode(), SCAN)) == [SCAN.text(text.encode()).decode()]


@given(st.text(max_size=10), st.text(max_size=10), st.data())
def test_no_way_to_write_a_character_hides_a_secret(
    before: str, after: str, data: st.DataObject
) -> None:
    secret = "joe@example.com"
    hidden = "".join(
        data.draw(st.sampled_from([c, f"\\u{ord(c):04x}", f"\\u{ord(c):04X}"])) for c in secret
    )
    raw = f'{{"a": {json.dumps(before)[:-1]} {hidden} {json.dumps(after)[1:]}}}'.encode()
    assert json.loads(redacted_body(raw, SCAN))["a"] == f"{before} {EMAIL} {after}"


def test_what_has_no_secret_is_the_same_object() -> None:
    raw = (
        b' {"model" :"m","max_tokens": 100,\n"n":1.0e2, "big": 123456789012345678901234567890,'
        b' "x": "\\u00e9\\/"}\n'
    )
    assert redacted_body(raw, SCAN) is raw


def test_only_the_string_with_the_secret_changes() -> None:
    raw = b'{"n" : 1.50, "a":"\\u00e9 joe@example.com", "b" :"\\u00e9\\/ @", "a":"twice" }'
    assert (
        redacted_body(raw, SCAN)
        == b'{"n" : 1.50, "a":"'
        + "é ".encode()
        + b'[REDACTED:EMAIL]", "b" :"\\u00e9\\/ @", "a":"twice" }'
    )


def test_arguments_of_a_tool_call_stay_json() -> None:
    arguments = {
        "to": "joe@example.com",
        "card": 4111111111111111,
        "login": {"password": 12345678},
        "note": 'say "hi"\n',
        "n": 3,
    }
    call = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "f", "arguments": json.dumps(arguments)}}],
    }
    new = redacted(call)
    said = json.loads(new["tool_calls"][0]["function"]["arguments"])
    assert said == {
        "to": EMAIL,
        "card": "[REDACTED:CARD]",
        "login": {"password": "[REDACTED:SECRET]"},
        "note": 'say "hi"\n',
        "n": 3,
    }


@pytest.mark.parametrize(
    ("value", "label"),
    [
        ({"password": "hunter2"}, "SECRET"), ({"password": "two words 1"}, "SECRET"),
        ({"user_password": 'a"b\\c1'}, "SECRET"), ({"apiKey": "abc123def456"}, "SECRET"),
        ({"token": "ghp_0123456789abcdefghijABCDEFGHIJ012345"}, "API_KEY"),
        ({"client_secret": 1234567}, "SECRET"), ({"password": "joe@example.com"}, "SECRET"),
        ({"password": None}, None), ({"password": ""}, None),
        ({"password": "<your password>"}, None), ({"max_tokens": 123456}, None),
        ({"token": "word"}, None),
        ({"password": {"type": "string"}}, None), ({"password": 1234}, None),
        ({"secret": True}, None), ({"tokens": "abc123def456"}, None),
    ],
)  # fmt: skip
def test_the_name_of_a_member_tells_a_secret_as_it_does_in_text(
    value: dict[str, Any], label: str | None
) -> None:
    ((name, said),) = value.items()
    assert redacted(value) == {name: f"[REDACTED:{label}]" if label else said}
    assert redacted({"x": {"y": [1, value, said == "joe@example.com"]}})["x"]["y"][1] == redacted(
        value
    )
    if isinstance(said, str) and '"' not in said:
        assert SCAN.text(json.dumps(value).encode()).decode() == json.dumps(redacted(value))


def test_names_that_hold_personal_data_are_redacted_but_no_others() -> None:
    assert redacted({"joe@example.com": {"password": "type"}, "secret": []}) == {
        EMAIL: {"password": "[REDACTED:SECRET]"},
        "secret": [],
    }


def test_what_is_no_json_is_text() -> None:
    assert redacted_body(b'{"a": "joe@example.com', SCAN) == b'{"a": "[REDACTED:EMAIL]'
    assert redacted({"a": '{"to": "joe@example.com", "pass'}) == {
        "a": '{"to": "[REDACTED:EMAIL]", "pass'
    }
    assert redacted({"a": '[INST] "joe@example.com" and joe@example.com'}) == {
        "a": f'[INST] "{EMAIL}" and {EMAIL}'
    }
    assert redacted_body(b"", SCAN) == b""


def test_json_in_json_in_json() -> None:
    value: Any = {"password": "hunter2", "a": "joe@example.com"}
    for _ in range(10):
        value = {"v": json.dumps(value)}
    new = redacted(value)
    assert "joe@" not in json.dumps(new) and "hunter2" not in json.dumps(new)
    for _ in range(10):
        new = json.loads(new["v"])


def test_deep_nesting_is_no_error() -> None:
    deep = "[" * 100_000 + '"joe@example.com"' + "]" * 100_000
    assert b"joe@" not in redacted_body(deep.encode(), SCAN)
    assert b"joe@" not in redacted_body(json.dumps({"a": deep}).encode(), SCAN)


def test_a_rule_of_ones_own_sees_every_string_by_itself() -> None:
    seen = []

    def find(text: str) -> list[tuple[int, int]]:
        seen.append(text)
        return [(0, 3)] if text.startswith("Joe") else []

    scan = Scan([], b"key", "plain", [NamedFinder("names", find)])
    raw = b'{"a": ["Joe\\n!", "no Joe"], "Joe": 1, "b": "{\\"c\\": \\"Joe\\"}"}'
    assert json.loads(redacted_body(raw, scan)) == {
        "a": ["[REDACTED:NAMES]\n!", "no Joe"], "[REDACTED:NAMES]": 1,
        "b": '{"c": "[REDACTED:NAMES]"}',
    }  # fmt: skip
    assert "Joe\n!" in seen
