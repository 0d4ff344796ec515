"""The base class and the field types of all settings sections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from clawstream.schemas.records.rewards import LARGEST_REWARD

HIGHEST_PORT = 65535
Port = Annotated[int, Field(ge=1, le=HIGHEST_PORT)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
RewardNumber = Annotated[float, Field(ge=-LARGEST_REWARD, le=LARGEST_REWARD)]
"""A reward or a weight, within the bounds of `clawstream.schemas.records.rewards`."""


@dataclass(frozen=True, slots=True)
class Secret:
    """Marks a field whose value, or a part of it, may be secret: no error repeats the value.

    written: What of it may be written to a file. options: those of a library whose names are not
        the names of secrets. arguments: a command line without such a name. all: a refused value
        may hold a secret, a valid one does not.
    """

    written: Literal["nothing", "options", "arguments", "all"] = "nothing"


class Section(BaseModel):
    """A frozen group of settings. Unknown keys are an error."""

    # An input that is refused may contain a secret.
    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), hide_input_in_errors=True
    )
