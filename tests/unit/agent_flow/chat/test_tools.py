"""Python functions as tools."""

from __future__ import annotations

import asyncio
import functools
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.agent_flow.chat.tools import LONGEST_RESULT, Tool, tools_of
from clawstream.agent_flow.errors import FlowError


def add(a: int, b: int = 1, unit: Literal["m", "km"] = "m") -> str:
    """Add two lengths."""
    return f"{a + b} {unit}"


async def divide(a: int, b: int) -> float:
    return a / b


def test_signature_and_docstring_are_the_definition() -> None:
    function = Tool(add).definition["function"]
    assert function["name"] == "add" and function["description"] == "Add two lengths."
    assert function["parameters"]["required"] == ["a"]
    assert function["parameters"]["properties"]["unit"]["enum"] == ["m", "km"]
    assert function["parameters"]["additionalProperties"] is False


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ('{"a": 2}', "3 m"),
        ('{"a": 2, "b": 3, "unit": "km"}', "5 km"),
        ('{"a": "x"}', "error: a: Input should be a valid integer, unable to parse string as an"),
        ('{"a": 1, "c": 2}', "error: c: Extra inputs are not permitted"),
        ("{", "error: : Invalid JSON"),
        ("", "error: a: Field required"),
    ],
)
def test_wrong_arguments_are_a_result_for_the_model(arguments: str, result: str) -> None:
    assert asyncio.run(Tool(add).call(arguments)).startswith(result)


def test_exception_of_a_tool_is_a_result_for_the_model() -> None:
    assert asyncio.run(Tool(divide).call('{"a": 1, "b": 2}')) == "0.5"
    error = asyncio.run(Tool(divide).call('{"a": 1, "b": 0}'))
    assert error == "error: ZeroDivisionError: division by zero"


def test_decorated_async_function_is_awaited() -> None:
    @functools.wraps(divide)
    def logged(*args: int, **kwargs: int) -> Any:
        return divide(*args, **kwargs)

    assert asyncio.run(Tool(logged).call('{"a": 1, "b": 2}')) == "0.5"


def test_long_result_is_cut() -> None:
    def everything() -> str:
        return "x" * (LONGEST_RESULT + 5)

    result = asyncio.run(Tool(everything).call("{}"))
    assert result == "x" * LONGEST_RESULT + " ... (5 characters omitted)"


def test_functions_that_are_no_tools_are_refused() -> None:
    def many(*numbers: int) -> int:
        return sum(numbers)

    with pytest.raises(FlowError, match=r"tool many: \*numbers has no JSON schema"):
        tools_of([many])

    def positional(a: int, /) -> int:
        return a

    def private(_a: int) -> int:
        return _a

    for function in (positional, private):
        with pytest.raises(FlowError, match="without leading underscore"):
            tools_of([function])
    with pytest.raises(FlowError, match="names must differ"):
        tools_of([add, add])


@given(st.text())
def test_no_text_of_a_model_raises(arguments: str) -> None:
    assert isinstance(asyncio.run(Tool(add).call(arguments)), str)
