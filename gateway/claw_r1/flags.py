r"""Translate the command line of Claw-R1's gateway to Clawstream settings.

    clawstream gateway --vllm-addresses a:8001,b:8001 --tokenizer-path P \
        --prompt-length 4096 --response-length 1024

Each flag keeps its meaning, or is accepted and ignored with a notice that gives the reason. Words
`a.b=c` are passed on unchanged and take precedence over flags.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import NamedTuple

IGNORED = {
    "data_pool_name": "steps go to Kafka, not to a data pool",
    "reward_worker_name": "name a function in its place: gateway.compute_reward=file.py:function@1",
    "ray_address": "there is no Ray",
    "ray_namespace": "there is no Ray",
}
"""Flags that are accepted and ignored, with the reason."""


class Translation(NamedTuple):
    """A command line of Claw-R1 as settings.

    words: for `clawstream.runtime.process.config.load`. notices: a line for each ignored flag.
    """

    words: list[str]
    notices: list[str]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="clawstream gateway",
        description="Flags of Claw-R1's gateway. See docs/claw-r1.md.",
        add_help=False,
    )
    parser.add_argument("--vllm-addresses", metavar="A,B", help="gateway.upstreams")
    parser.add_argument("--tokenizer-path", metavar="DIR", help="gateway.tokenizer_path")
    parser.add_argument(
        "--prompt-length", type=int, metavar="TOKENS", help="gateway.max_prompt_tokens"
    )
    parser.add_argument(
        "--response-length", type=int, metavar="TOKENS", help="gateway.default_max_tokens"
    )
    parser.add_argument("--host", help="gateway.host")
    parser.add_argument("--port", type=int, help="gateway.port")
    for name, why in IGNORED.items():
        parser.add_argument("--" + name.replace("_", "-"), help=f"no meaning: {why}")
    parser.add_argument("words", nargs="*", metavar="a.b=c")
    return parser


def translate(arguments: Sequence[str]) -> Translation:
    """Translate flags and words to settings.

    Exits with 2 and the usage on an unknown flag, as argparse does.
    """
    flags = _parser().parse_intermixed_args(arguments)
    words = []
    if flags.vllm_addresses is not None:
        addresses = [_with_scheme(a.strip()) for a in flags.vllm_addresses.split(",") if a.strip()]
        words.append(_word("upstreams", addresses))
    for flag, setting in (
        ("tokenizer_path", "tokenizer_path"),
        ("prompt_length", "max_prompt_tokens"),
        ("response_length", "default_max_tokens"),
        ("host", "host"),
        ("port", "port"),
    ):
        if (value := getattr(flags, flag)) is not None:
            words.append(_word(setting, value))
    notices = [
        f"--{name.replace('_', '-')} has no meaning any more: {why}"
        for name, why in IGNORED.items()
        if getattr(flags, name) is not None
    ]
    return Translation([*words, *flags.words], notices)


def overrides_of(arguments: Sequence[str]) -> list[str]:
    """Return the words of `translate`; write the notices to standard error."""
    translation = translate(arguments)
    for notice in translation.notices:
        sys.stderr.write(f"clawstream: {notice}\n")
    return translation.words


def _word(setting: str, value: object) -> str:
    return f"gateway.{setting}={json.dumps(value)}"


def _with_scheme(address: str) -> str:
    return address if address.startswith(("http://", "https://")) else f"http://{address}"
