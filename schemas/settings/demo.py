"""The demo."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from clawstream.schemas.settings.base import Count, Section


class DemoSettings(Section):
    """`python -m clawstream.demo`."""

    seed: int = Field(0, description="another run")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="of the saved model and of the engine"
    )
    versions: Count = Field(45, description="shorter or longer training")
    groups_per_batch: Count = Field(16, description="groups a batch")
    concurrency: Count = Field(128, description="agents at once")
    eval_tasks: Count = Field(200, description="held-out tasks before and after")
    warm_start_steps: Count = Field(250, description="supervised steps before RL")
    staleness: Annotated[int, Field(ge=0)] = Field(
        1, description="versions that rollouts may run ahead"
    )
    stream_share: Annotated[float, Field(ge=0, le=1)] = Field(
        0.25, description="share of episodes that stream"
    )
