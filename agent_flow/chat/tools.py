"""Python functions as tools of a model: their JSON schema, and calls with a model's arguments."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

from pydantic import ConfigDict, ValidationError, create_model

from clawstream.agent_flow.errors import FlowError
from clawstream.agent_flow.threads import in_thread

LONGEST_RESULT = 100_000
"""Characters of a tool's result that the model gets."""


class Tool:
    """A function that a model may call. Its docstring tells the model what it does.

    Attributes:
        name: of the function.
        definition: in the form of OpenAI's `tools`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises FlowError if the function has parameters that JSON cannot name."""
        self._function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        hints, fields = get_type_hints(function), {}
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise FlowError(f"tool {self.name}: *{parameter.name} has no JSON schema")
            if parameter.kind is parameter.POSITIONAL_ONLY or parameter.name.startswith("_"):
                raise FlowError(
                    f"tool {self.name}: a parameter has a name without leading underscore, and no "
                    f"`/` after it: {parameter.name}"
                )
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (hints.get(parameter.name, Any), default)
        create: Any = create_model
        self._arguments = create(self.name, __config__=ConfigDict(extra="forbid"), **fields)
        schema = self._arguments.model_json_schema()
        schema.pop("title", None)
        self.definition: dict[str, Any] = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": inspect.getdoc(function) or self.name,
                "parameters": schema,
            },
        }

    async def call(self, arguments: str) -> str:
        """Return the function's result as text.

        An error is a result, too: the model sees it and may correct itself.

        Args:
            arguments: JSON object as the model wrote it.
        """
        try:
            given = self._arguments.model_validate_json(arguments or "{}")
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            return f"error: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        values = {name: getattr(given, name) for name in self._arguments.model_fields}
        try:
            if inspect.iscoroutinefunction(self._function):
                result = await self._function(**values)
            else:
                result = await in_thread(self._function, **values)
                if inspect.isawaitable(result):  # of an async function behind a decorator
                    result = await result
            return _text(result)
        except Exception as error:  # noqa: BLE001 - of the user's tool, for the model to see
            return f"error: {type(error).__name__}: {error}"


def tools_of(functions: Sequence[Callable[..., Any] | Tool]) -> Mapping[str, Tool]:
    """Return tools by name.

    Raises:
        FlowError: Two have the same name, or one cannot be a tool.
    """
    tools = [f if isinstance(f, Tool) else Tool(f) for f in functions]
    by_name = {tool.name: tool for tool in tools}
    if len(by_name) < len(tools):
        raise FlowError(f"tools {sorted(t.name for t in tools)}: names must differ")
    return by_name


def _text(result: Any) -> str:
    text = result if isinstance(result, str) else json.dumps(result, default=str)
    if len(text) > LONGEST_RESULT:
        return text[:LONGEST_RESULT] + f" ... ({len(text) - LONGEST_RESULT} characters omitted)"
    return text
