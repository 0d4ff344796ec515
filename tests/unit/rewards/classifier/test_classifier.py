"""The discriminative model at a real HTTP endpoint, and a small one in this process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.model_endpoint import model_endpoint
from support.trajectories import answered

from clawstream.rewards.classifier.reward import classifier
from clawstream.rewards.endpoint import EndpointError
from clawstream.rewards.registry import rule_of
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import JobsSettings, Settings


@pytest.mark.parametrize(
    ("settings", "path", "sent", "reply", "value"),
    [
        ({}, "/classify", {"input": ["42"], "use_activation": True}, {"probs": [0.9, 0.1]}, 0.1),
        ({"label": 0}, "/classify", {"input": ["42"]}, {"probs": [0.9, 0.1]}, 0.9),
        ({"raw": True}, "/classify", {"use_activation": False}, {"probs": [3.5]}, 3.5),
        (
            {"query": "{metadata.question}"}, "/score", {"text_1": "6 * 7?", "text_2": "42"},
            {"score": 0.25}, 0.25,
        ),
    ],
)  # fmt: skip
def test_an_endpoint_rates_the_answer(
    settings: dict[str, Any], path: str, sent: dict[str, Any], reply: dict[str, Any], value: float
) -> None:
    with model_endpoint(lambda _: (200, {"data": [reply]})) as endpoint:
        reward = classifier({"type": "disrm", "model": "m", "url": endpoint.url, **settings})
        assert asyncio.run(reward(answered("42", question="6 * 7?"))) == value
    ((asked, body),) = endpoint.requests
    assert asked == path and body["model"] == "m" and sent.items() <= body.items()


@pytest.mark.parametrize("data", [[], [{"probs": []}], [{"score": 1}], None])
def test_a_reply_without_a_score_is_no_reward(data: Any) -> None:
    with model_endpoint(lambda _: (200, {"data": data})) as endpoint:
        reward = classifier({"type": "disrm", "model": "m", "url": endpoint.url})
        with pytest.raises(EndpointError, match="has no score"):
            asyncio.run(reward(answered("42")))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("a:b", {}, "pattern"),
        ("rm", {"url": "http://rm", "device": "cuda"}, "device has no effect with url"),
        ("rm", {"attempts": 5}, "attempts has no effect without url"),
    ],
)
def test_a_setting_without_effect_is_refused(
    name: str, settings: dict[str, Any], message: str
) -> None:
    model = {"type": "disrm", "model": "m", **settings}
    with pytest.raises(ValueError, match=message):
        JobsSettings.model_validate({"reward_models": {name: model}})


def test_a_reward_model_hides_no_built_in_function() -> None:
    models = JobsSettings.model_validate(
        {"reward_models": {"exact_match": {"type": "disrm", "model": "m"}}}
    ).reward_models
    with pytest.raises(SettingsError, match=r"^setting jobs\.reward_models\.exact_match: "):
        rule_of("last_number@1", "s", lambda *_: lambda _: None, models)


def test_a_local_model_may_have_any_time_of_its_function() -> None:
    models = {"rm": {"type": "disrm", "model": "m"}}
    Settings.model_validate({"functions": {"timeout_s": 5}, "jobs": {"reward_models": models}})


@pytest.mark.slow
@pytest.mark.parametrize("labels", [1, 2])
def test_a_model_of_hugging_face_rates_a_batch_as_it_rates_each(
    tmp_path: Path, labels: int
) -> None:
    torch = pytest.importorskip("torch")
    from support.byte_tokenizer import byte_tokenizer
    from support.model_families import SHAPE
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    tokenizer = byte_tokenizer("", size=300)
    config = LlamaConfig(vocab_size=300, num_labels=labels, pad_token_id=0, **SHAPE)
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    many = [answered("short"), answered("a longer answer"), answered("no")]
    raw = classifier({"type": "disrm", "model": str(tmp_path), "raw": True, "batch_size": 8})
    rated = classifier({"type": "disrm", "model": str(tmp_path)})
    assert raw.batch_size == 8
    logits = [model(**tokenizer(t, return_tensors="pt")).logits[0].detach()
              for t in ("short", "a longer answer", "no")]  # fmt: skip
    expected = [float(one[-1]) for one in logits]
    assert raw(many) == pytest.approx(expected, abs=1e-4)
    assert [raw([one])[0] for one in many] == pytest.approx(expected, abs=1e-4)
    shares = [one.sigmoid()[0] if labels == 1 else one.softmax(0)[-1] for one in logits]
    assert rated(many) == pytest.approx([float(share) for share in shares], abs=1e-4)
    long, short = raw([answered("x" * 10_000), answered("short")])
    assert long[0] is None and long[1]["tokens"] > long[1]["tokens_max"]
    assert short == pytest.approx(expected[0], abs=1e-4)
    with pytest.raises(ValueError, match="label=2: "):
        classifier({"type": "disrm", "model": str(tmp_path), "label": 2})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("models_pad", "tokenizers_pad", "side"),
    [
        (None, None, "right"),
        (2, "<|endoftext|>", "right"),
        (None, "<|im_end|>", "left"),
        (0, "<|endoftext|>", "left"),
    ],
)
@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_the_score_is_that_of_the_last_token_alone_and_in_a_batch(
    tmp_path: Path, family: str, models_pad: int | None, tokenizers_pad: str | None, side: str
) -> None:
    torch = pytest.importorskip("torch")
    import transformers
    from support.byte_tokenizer import byte_tokenizer
    from support.model_families import SHAPE

    torch.manual_seed(0)
    tokenizer = byte_tokenizer("", size=300)
    tokenizer.pad_token, tokenizer.padding_side = tokenizers_pad, side
    shape = SHAPE if family == "Llama" else {"n_embd": 64, "n_layer": 2, "n_head": 2}
    configuration = getattr(transformers, f"{family}Config")(
        vocab_size=300, num_labels=1, pad_token_id=models_pad, eos_token_id=2, **shape
    )
    kind = getattr(transformers, f"{family}ForSequenceClassification")
    model = kind(configuration).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    texts = ["no<|im_end|>", "a longer answer<|im_end|>", "cut", "<|endoftext|>", "x<|endoftext|>"]
    expected = []
    with torch.inference_mode():
        for text in texts:
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            expected.append(float(model.score(model.base_model(ids)[0][0, -1])))
    rate = classifier({"type": "disrm", "model": str(tmp_path), "raw": True})
    assert rate([answered(text) for text in texts]) == pytest.approx(expected, abs=1e-4)
    assert [rate([answered(text)])[0] for text in texts] == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("pad", [None, "<|endoftext|>"])
def test_an_encoder_scores_a_text_alone_and_in_a_batch_alike(
    tmp_path: Path, pad: str | None
) -> None:
    torch = pytest.importorskip("torch")
    from support.byte_tokenizer import byte_tokenizer
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    tokenizer = byte_tokenizer("", size=300)
    tokenizer.pad_token = pad
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=300, num_labels=1, hidden_size=64, num_hidden_layers=2,
            num_attention_heads=2, intermediate_size=64,
        )
    ).eval()  # fmt: skip
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    texts = ["no", "a longer answer", "cut"]
    expected = [
        float(model(torch.tensor([tokenizer(text)["input_ids"]])).logits.detach()) for text in texts
    ]
    rate = classifier({"type": "disrm", "model": str(tmp_path), "raw": True})
    empty, *scores = rate([answered(""), *map(answered, texts)])
    assert empty == (None, {"tokens": 0, "tokens_max": 512})
    assert scores == pytest.approx(expected, abs=1e-4)
    assert [rate([answered(text)])[0] for text in texts] == pytest.approx(expected, abs=1e-4)
