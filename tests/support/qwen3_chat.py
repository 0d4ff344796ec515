"""A tiny tokenizer and a chat template in the format of Qwen3: tools, reasoning, tool results."""

from __future__ import annotations

from support.byte_tokenizer import CHATML_TOKENS, byte_tokenizer
from transformers import PreTrainedTokenizerFast

SPECIAL = (
    *(*CHATML_TOKENS, "<think>", "</think>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)
TEMPLATE = """\
{%- set last = namespace(at=-1) -%}
{%- for m in messages -%}
{%- if m.role == "user" -%}{%- set last.at = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
<|im_start|>system{{ "\\n" }}{{ tools | tojson }}<|im_end|>{{ "\\n" }}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == "tool" -%}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" -%}<|im_start|>user{%- endif -%}
{{ "\\n" }}<tool_response>{{ "\\n" + m.content + "\\n" }}</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != "tool" -%}<|im_end|>{{ "\\n" }}{%- endif -%}
{%- elif m.role == "assistant" -%}
<|im_start|>{{ "assistant\\n" }}
{%- if m.reasoning and loop.index0 > last.at -%}
<think>{{ "\\n" + m.reasoning + "\\n" }}</think>{{ "\\n\\n" }}
{%- endif -%}
{{ m.content or "" }}
{%- for call in m.tool_calls or [] -%}
{{ "\\n" }}<tool_call>{{ '\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ "}\\n" }}</tool_call>
{%- endfor -%}
<|im_end|>{{ "\\n" }}
{%- else -%}
<|im_start|>{{ m.role + "\\n" + m.content }}<|im_end|>{{ "\\n" }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>{{ "assistant\\n" }}
{%- if enable_thinking is defined and not enable_thinking -%}
<think>{{ "\\n\\n" }}</think>{{ "\\n\\n" }}
{%- endif -%}
{%- endif -%}
"""
"""Leaves the reasoning of earlier questions out and writes arguments of tools in its own form."""


def qwen3_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and the special tokens of Qwen3."""
    return byte_tokenizer(TEMPLATE, SPECIAL)
