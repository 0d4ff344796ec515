"""OpenAI Completions: a prompt and a text, without messages. Pure."""

from __future__ import annotations

from clawstream.schemas.conversation.protocol import Protocol

OPENAI_COMPLETIONS = Protocol(name="openai.completions", prompt=("prompt", "suffix"))
