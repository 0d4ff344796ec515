"""Redacted token ids contain no secrets and keep shared prefixes, with real tokenizers."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.examples import examples
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from clawstream.gateway.redaction.rules import RULES
from clawstream.gateway.redaction.scan import NamedFinder, Scan
from clawstream.gateway.redaction.token_edits import InconsistentTokens, Tokens, redacted_tokens
from clawstream.gateway.redaction.vocabulary import TokenizerUnusable, UnknownToken, Vocabulary
from clawstream.schemas.records import TokenSpan, VersionSpan
from clawstream.schemas.tokens import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs
from clawstream.stream_jobs.assemble.payload.segment_tree import SampledTokens, build

SCAN = Scan(list(RULES.values()), b"key")
SECRETS = [
    "joe@example.com",
    "4111 1111 1111 1111",
    "sk-proj-abcDEF0123456789abcDEF",
    "hunter22!",
    "+49 30 1234567",
    "123-45-6789",
]
WORDS = [
    "mail ",
    " to",
    "password is ",
    "é",
    "日本",
    "🙂",
    ".",
    "\n",
    " ",
    "x",
    '"',
    "\\n",
    "@",
    "-",
    "12",
    "<|im_end|>",
    "{",
    ": ",
    *SECRETS,
    *SECRETS,
]
CORPUS = [
    " ".join(WORDS),
    "user\nassistant\nsystem\n",
    *("".join(WORDS[i:] + WORDS[:i]) for i in range(len(WORDS))),
]
SPECIAL = ("<|im_start|>", "<|im_end|>")
KINDS = ("bytes", "bytes across words", "sentencepiece", "words")


@cache
def tokenizer(kind: str) -> Tokenizer:
    """Small tokenizers of common families; `bytes across words` has tokens across two words."""
    if kind == "words":
        core = Tokenizer(
            models.WordLevel(
                {
                    w: i
                    for i, w in enumerate(
                        [*dict.fromkeys([*WORDS, *map(chr, range(32, 127)), "�"])]
                    )
                },
                unk_token="�",
            )
        )
        core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        core.decoder = decoders.Fuse()
    elif kind == "sentencepiece":
        core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        core.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=["<unk>"],
            initial_alphabet=list("abcdefghijklmnopqrstuvwxyz0123456789:[]"),
            show_progress=False,
        )
        core.train_from_iterator(CORPUS, trainer)
        said = orjson.loads(core.to_str())
        said["model"]["vocab"] |= {
            f"<0x{b:02X}>": len(said["model"]["vocab"]) + b for b in range(256)
        }
        core = Tokenizer.from_str(orjson.dumps(said).decode())
        core.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    else:
        core = Tokenizer(models.BPE())
        if kind == "bytes":
            core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        else:
            core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=600,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        core.train_from_iterator(CORPUS, trainer)
    core.add_special_tokens(list(SPECIAL))
    core.add_tokens([AddedToken("<tool_call>", normalized=False)])
    return core


@cache
def vocabulary(kind: str, folder: Path) -> Vocabulary:
    tokenizer(kind).save(str(folder / f"{kind}.json"))
    return Vocabulary.load(folder / f"{kind}.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


def shown(known: Vocabulary, ids: list[int]) -> bytes:
    return known.spell(pack_ids(ids))[1]


def redacted(
    prompt: list[int], response: list[int], known: Vocabulary, scan: Scan = SCAN
) -> Tokens:
    logprobs = pack_logprobs([-float(i) for i in range(len(response))])
    spans = (
        VersionSpan(version="r/1.0", start=0, end=len(response) // 2),
        VersionSpan(version="r/2.0", start=len(response) // 2, end=len(response)),
    )
    return redacted_tokens(
        Tokens(
            pack_ids(prompt),
            pack_ids(response),
            logprobs,
            tuple(s for s in spans if s.start < s.end),
        ),
        known,
        scan,
    )


texts = st.lists(st.sampled_from(WORDS), max_size=12).map("".join)
harmless = st.lists(st.sampled_from([w for w in WORDS if w not in SECRETS]), max_size=12).map(
    "".join
)
slow = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(60)
)


@pytest.mark.parametrize("kind", KINDS)
@slow
@given(text=texts)
def test_pieces_are_what_the_tokenizer_decodes(kind: str, folder: Path, text: str) -> None:
    known, ids = vocabulary(kind, folder), tokenizer(kind).encode(text).ids
    said = shown(known, ids).decode("utf-8", "replace")
    assert tokenizer(kind).decode(ids, skip_special_tokens=False).lstrip(" ") == said.lstrip(" ")


@st.composite
def conversations(draw: st.DrawFn, kind: str) -> list[tuple[list[int], list[int]]]:
    """Prompt and response of each turn; a truncated reply gets its end token from the template."""
    core = tokenizer(kind)
    start, end = (core.token_to_id(s) for s in SPECIAL)

    def encode(text: str) -> list[int]:
        core.encode_special_tokens = True
        return core.encode(text, add_special_tokens=False).ids

    def message(role: str, text: str) -> list[int]:
        return [start, *encode(f"{role}\n{text}"), end, *encode("\n")]

    prompt = message("system", draw(texts)) if draw(st.booleans()) else []
    turns = []
    for _ in range(draw(st.integers(1, 4))):
        prompt = prompt + message("user", draw(texts)) + [start, *encode("assistant\n")]
        reply = encode(draw(texts))
        if draw(st.booleans()):  # as a model samples: any ids
            reply = draw(
                st.lists(st.sampled_from(reply or [0]) | st.integers(0, start - 1), max_size=12)
            )
        cut = draw(st.booleans())
        reply = reply[: draw(st.integers(0, len(reply)))] if cut else [*reply, end]
        turns.append((prompt, reply))
        prompt = prompt + reply + ([end] if cut else []) + encode("\n")
    return turns


@pytest.mark.parametrize("kind", KINDS)
@slow
@given(data=st.data())
def test_a_turn_that_continued_another_still_does(
    kind: str, folder: Path, data: st.DataObject
) -> None:
    known, turns = vocabulary(kind, folder), data.draw(conversations(kind))
    new = [redacted(p, r, known) for p, r in turns]
    for one, next_ in pairwise(new):
        assert one.prompt is not None and one.response is not None and next_.prompt is not None
        assert next_.prompt.startswith(one.prompt + one.response)
    tree = build([SampledTokens(t.prompt or b"", t.response or b"", t.logprobs) for t in new])
    before = build(
        [SampledTokens(pack_ids(p), pack_ids(r), pack_logprobs([0.0] * len(r))) for p, r in turns]
    )
    assert [(n.parent, n.drift) for n in tree.nodes] == [(n.parent, n.drift) for n in before.nodes]


@pytest.mark.parametrize("kind", KINDS)
@slow
@given(data=st.data())
def test_tokens_say_what_the_redacted_text_says(
    kind: str, folder: Path, data: st.DataObject
) -> None:
    known = vocabulary(kind, folder)
    for prompt, response in data.draw(conversations(kind)):
        new = redacted(prompt, response, known)
        ids = [*unpack_ids(new.prompt or b""), *unpack_ids(new.response or b"")]
        special = {tokenizer(kind).token_to_id(s) for s in SPECIAL}
        pieces = known.spell(pack_ids([*prompt, *response]))[0]
        wanted, segment = b"", b""
        for number, piece in zip([*prompt, *response, None], [*pieces, b""], strict=True):
            if number is None or number in special:
                wanted, segment = wanted + SCAN.text(segment) + piece, b""
            else:
                segment += piece
        told = shown(known, ids)
        if kind == "words":  # which lacks letters of the replacement
            told, wanted = told.replace("�".encode(), b""), wanted.replace("�".encode(), b"")
        assert told.decode("utf-8", "replace") == wanted.decode("utf-8", "replace")


@pytest.mark.parametrize("kind", KINDS)
@slow
@given(data=st.data())
def test_what_is_indexed_by_token_moves_along(kind: str, folder: Path, data: st.DataObject) -> None:
    known = vocabulary(kind, folder)
    for prompt, response in data.draw(conversations(kind)):
        new = redacted(prompt, response, known)
        ids, logprobs = unpack_ids(new.response or b""), unpack_logprobs(new.logprobs or b"")
        assert len(logprobs) == len(ids)
        gone = {i for s in new.redacted_response for i in range(s.start, s.end)}
        assert gone == {i for i, p in enumerate(logprobs) if math.isnan(p)} and len(gone) == sum(
            s.end - s.start for s in new.redacted_response
        )
        kept = [i for i in range(len(ids)) if i not in gone]
        assert all(ids[i] == response[-int(logprobs[i])] for i in kept)
        assert [s.start for s in new.versions[1:]] == [s.end for s in new.versions[:-1]]
        assert not ids or (new.versions[0].start, new.versions[-1].end) == (0, len(ids))
        for span in new.versions:
            older = span.version == "r/1.0"
            assert all(
                (-logprobs[i] < len(response) // 2) == older
                for i in kept
                if span.start <= i < span.end
            )
        length = len(unpack_ids(new.prompt or b""))
        assert all(0 <= s.start < s.end <= length for s in new.redacted_prompt)


@pytest.mark.parametrize("kind", ["bytes", "bytes across words", "sentencepiece"])
@slow
@given(text=st.tuples(harmless, st.sampled_from(SECRETS[:3]), harmless), at=st.integers(0, 100))
def test_a_secret_from_the_prompt_into_the_response_is_replaced_in_the_response(
    kind: str, folder: Path, text: tuple[str, str, str], at: int
) -> None:
    known = vocabulary(kind, folder)
    ids = tokenizer(kind).encode(" ".join(text), add_special_tokens=False).ids
    border = min(at, len(ids))
    new, whole = redacted(ids[:border], ids[border:], known), redacted(ids, [], known)
    assert (new.prompt or b"") + (new.response or b"") == whole.prompt
    spans = [
        *new.redacted_prompt,
        *(
            TokenSpan(
                start=s.start + len(new.prompt or b"") // 4, end=s.end + len(new.prompt or b"") // 4
            )
            for s in new.redacted_response
        ),
    ]
    assert spans == list(whole.redacted_prompt)
    assert all(
        secret.encode() not in shown(known, unpack_ids(whole.prompt or b""))
        for secret in SECRETS[:3]
    )


@slow
@given(before=harmless, after=harmless, cut=st.integers(1, 14))
def test_without_special_tokens_a_secret_that_the_next_turn_ends_begins_a_branch_and_shows_nothing(
    folder: Path, before: str, after: str, cut: int
) -> None:
    known, core = vocabulary("bytes", folder), tokenizer("bytes")
    core.encode_special_tokens = True
    first = core.encode(f"{before} joe@example.com"[: len(before) + 1 + cut]).ids
    rest = core.encode("joe@example.com"[cut:] + " " + after).ids
    assert b"joe@example.com" not in shown(
        known, unpack_ids(redacted(first + rest, [], known).prompt or b"")
    )


def test_without_special_tokens_a_turn_that_is_over_is_continued(folder: Path) -> None:
    known, core = vocabulary("bytes", folder), tokenizer("bytes")
    first = core.encode("user: mail joe@example.com\nassistant: ").ids
    reply = core.encode("to joe@example.com.\n").ids
    one, two = (
        redacted(first, reply, known),
        redacted([*first, *reply, *core.encode("user: x").ids], reply, known),
    )
    assert (two.prompt or b"").startswith(
        (one.prompt or b"") + (one.response or b"")
    ) and one.redacted_response


def test_tokens_without_a_secret_are_the_same_object(folder: Path) -> None:
    tokens = Tokens(pack_ids(tokenizer("bytes").encode("mail to x @").ids), None, None, ())
    assert redacted_tokens(tokens, vocabulary("bytes", folder), SCAN) is tokens


def test_one_side_alone(folder: Path) -> None:
    known, ids = vocabulary("bytes", folder), tokenizer("bytes").encode("mail joe@example.com").ids
    only = redacted_tokens(Tokens(None, pack_ids(ids), None, ()), known, SCAN)
    assert (
        only.prompt is None
        and only.logprobs is None
        and only.redacted_response
        and b"joe" not in shown(known, unpack_ids(only.response or b""))
    )


@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        (
            Tokens(None, pack_ids([1, 2]), pack_logprobs([0.0]), ()),
            "4 bytes of log-probabilities for 8",
        ),
        (Tokens(b"abc", b"abcd", None, ()), "3 and 4 bytes of ids"),
    ],
)
def test_ids_and_log_probabilities_that_do_not_fit_are_an_error(
    folder: Path, tokens: Tokens, why: str
) -> None:
    with pytest.raises(InconsistentTokens, match=why):
        redacted_tokens(tokens, vocabulary("bytes", folder), SCAN)


@pytest.mark.parametrize("number", [-1, 100_000])
def test_an_id_of_another_model_is_an_error(folder: Path, number: int) -> None:
    with pytest.raises(UnknownToken, match=str(number % 2**32)):
        redacted_tokens(
            Tokens(pack_ids([1, number]), None, None, ()), vocabulary("bytes", folder), SCAN
        )


def test_a_rule_of_ones_own_sees_each_text_between_special_tokens(folder: Path) -> None:
    seen: list[str] = []

    def find(text: str) -> list[tuple[int, int]]:
        seen.append(text)
        return [(0, 2)] if "日本" in text else []

    core = tokenizer("bytes")
    core.encode_special_tokens = False
    ids = core.encode("<|im_start|>x to<|im_end|>日本 x").ids
    new = redacted(
        ids,
        [],
        vocabulary("bytes", folder),
        Scan([], b"key", "plain", [NamedFinder("places", find)]),
    )
    assert seen == ["x to", "日本 x"]
    assert (
        shown(vocabulary("bytes", folder), unpack_ids(new.prompt or b"")).decode()
        == "<|im_start|>x to<|im_end|>[REDACTED:PLACES] x"
    )


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_a_tokenizer_that_does_not_tell_bytes_is_unusable(tmp_path: Path, decoder: Any) -> None:
    said = orjson.loads(tokenizer("bytes").to_str()) | {"decoder": decoder}
    (tmp_path / "tokenizer.json").write_bytes(orjson.dumps(said))
    with pytest.raises(TokenizerUnusable, match=r"tokenizer\.json: unsupported decoder"):
        Vocabulary.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerUnusable, match=r"tokenizer\.json: JSONDecodeError"):
        Vocabulary.load(tmp_path)
