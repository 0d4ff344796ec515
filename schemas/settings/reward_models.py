"""Rewards with settings of their own: code tests, generative judges, discriminative models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from clawstream.schemas.records.parts import RewardSource
from clawstream.schemas.settings.base import Count, Positive, Section

REPLIES = "Task:\n{metadata}\n\nReplies of the assistant:\n{replies}"
SCALE = 10
NEXT_STATE = """\
A conversation. Grade the last reply of the assistant in it:
{conversation}

What the assistant got next, from the user or as the result of a tool. Grade by what it shows about
that reply:
{next}"""


class CodeTests(Section):
    """The answer's code against the tests of its task, in a sandbox."""

    type: Literal["code"]
    timeout_s: Positive = Field(
        10.0, description="longest time of all tests of an answer; below functions.timeout_s"
    )
    memory_mb: Count = Field(512, description="memory of the program and all that it starts")
    processes: Count = Field(16, description="processes and threads of the program")
    partial: bool = Field(False, description="reward the share of passed tests")


class Judge(Section):
    """A language model that grades by a rubric, at an endpoint with OpenAI's Chat Completions."""

    type: Literal["genrm"]
    url: str = Field(description="base URL with its `/v1`, of any OpenAI-compatible endpoint")
    model: str = Field(description="name of the model there")
    rubric: str = Field(description="what a good answer is, in words")
    template: str | None = Field(
        None,
        description="what the judge reads: {metadata}, {metadata.KEY}, {replies}, {answer}, "
        "{conversation}, {next}; default: metadata and replies, or conversation and next",
    )
    per: Literal["trajectory", "step", "next_state", "group"] = Field(
        "trajectory",
        description="step: a reward of each step, which sees the replies up to it; next_state: of "
        "each step with a next turn, by what that turn brings; group: the members of a group are "
        "compared in pairs",
    )
    opponents: Count | None = Field(
        None, description="per=group: members that each one is compared with; default: all others"
    )
    scale: Count = Field(
        SCALE, description="highest score; the reward is score / scale; not for per=group"
    )
    votes: Count = Field(1, description="replies sampled for a verdict; their majority counts")
    temperature: Annotated[float, Field(ge=0)] = Field(
        0.0, description="above 0 for votes that differ"
    )
    max_tokens: Count = Field(512, description="longest reply of the judge")
    extra_body: Mapping[str, Any] = Field(
        {}, description="more fields of the request, such as chat_template_kwargs; null: none"
    )
    api_key_env: str | None = Field(None, description="environment variable with the API key")
    timeout_s: Positive = Field(
        25.0, description="longest time of a verdict with all attempts; below functions.timeout_s"
    )
    attempts: Count = Field(3, description="of a request that fails, with growing pauses")
    budget_calls: Count | None = Field(None, description="requests in the window; then no reward")
    budget_tokens: Count | None = Field(None, description="tokens in the window; then no reward")
    budget_window_s: Positive | None = Field(
        3600.0, description="window of the budget; null: all of a run"
    )
    cache_replies: Count = Field(100_000, description="replies kept; the oldest are dropped")
    cache_file: Path | None = Field(
        None, description="replies and spending; default: judges.sqlite in data_dir"
    )

    @model_validator(mode="after")
    def _next_turn_is_read(self) -> Judge:
        if ("{next}" in self.material()) != (self.per == "next_state"):
            raise ValueError("template: {next} is read with per=next_state, and only there")
        return self

    @model_validator(mode="after")
    def _comparisons_have_no_scale(self) -> Judge:
        if self.per == "group" and self.scale != SCALE:
            raise ValueError("scale has no effect with per=group: leave it out")
        if self.per != "group" and self.opponents is not None:
            raise ValueError("opponents is for per=group: leave it out")
        return self

    def material(self) -> str:
        """Return the template of what the judge reads."""
        if self.template is not None:
            return self.template
        return NEXT_STATE if self.per == "next_state" else REPLIES

    @model_validator(mode="after")
    def _votes_differ(self) -> Judge:
        if self.votes > 1 and not self.temperature:
            raise ValueError(
                f"votes={self.votes} with temperature=0: all votes would be equal; set temperature"
            )
        return self


class Classifier(Section):
    """A sequence classifier: Hugging Face's in a child process, or vLLM's `/classify`, `/score`."""

    type: Literal["disrm"]
    model: str = Field(description="folder of the model, or its name at the endpoint")
    url: str | None = Field(
        None, description="base URL of a vLLM; default: the model runs in a child process"
    )
    template: str = Field(
        "{answer}",
        description="the text: {metadata}, {metadata.KEY}, {replies}, {answer}, {conversation}",
    )
    query: str | None = Field(
        None, description="template of a first text, for models that rate pairs (`/score`)"
    )
    label: int = Field(-1, description="the output that is the reward; -1: the last, or only one")
    raw: bool = Field(
        False, description="logits instead of probabilities, for reward models with one output"
    )
    batch_size: Count = Field(32, description="texts at once in a child process")
    device: str = Field("cpu", description="of torch, in a child process")
    api_key_env: str | None = Field(None, description="environment variable with the API key")
    timeout_s: Positive = Field(
        25.0, description="longest time at the endpoint; below functions.timeout_s"
    )
    attempts: Count = Field(3, description="of a request that fails, with growing pauses")

    @model_validator(mode="after")
    def _has_effect(self) -> Classifier:
        local, remote = ("device", "batch_size"), ("timeout_s", "attempts", "api_key_env")
        for name in remote if self.url is None else local:
            if getattr(self, name) != type(self).model_fields[name].default:
                given = "without" if self.url is None else "with"
                raise ValueError(f"{name} has no effect {given} url: leave it out")
        return self


RewardModel = Annotated[CodeTests | Judge | Classifier, Field(discriminator="type")]
SOURCES: Mapping[str, RewardSource] = {"code": "rule", "genrm": "judge", "disrm": "model"}
"""Type of a reward model to the source that its rewards carry."""


def source_of(model: RewardModel) -> RewardSource:
    """Return the source that the rewards of a model carry."""
    if isinstance(model, Judge) and model.per == "next_state":
        return "next_state"
    return SOURCES[model.type]


def compares(model: RewardModel | None) -> bool:
    """Return whether a model rewards the members of a group by comparing them."""
    return isinstance(model, Judge) and model.per == "group"


def reads_messages(model: RewardModel) -> bool:
    """Return whether a model reads the messages of requests, not only replies."""
    if isinstance(model, CodeTests):
        return False
    read = model.material() if isinstance(model, Judge) else f"{model.template} {model.query}"
    return "{conversation}" in read or "{next}" in read
