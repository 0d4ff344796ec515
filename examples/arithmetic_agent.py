"""Word problems with a calculator, as a command line that knows only the OpenAI client.

    clawstream flow exec tasks=examples/arithmetic.jsonl n=8 reward=examples/grade.py:grade \
        -- python $PWD/examples/arithmetic_agent.py {question}

The client reads OPENAI_BASE_URL and OPENAI_API_KEY, which `flow exec` sets for each rollout.
"""

import json
import sys

from openai import OpenAI

CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Compute an arithmetic expression of whole numbers, e.g. `3 * 12 + 4`.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def calculate(arguments: str) -> str:
    """An error is a result: the model sees it and may correct itself."""
    try:
        expression = json.loads(arguments)["expression"]
        if not set(expression) <= set("0123456789+-* ()") or "**" in expression:
            return "error: only digits, + - * and brackets"
        return str(eval(expression))
    except (ValueError, KeyError, TypeError, SyntaxError) as error:
        return f"error: {error}"


def answer(question: str) -> str:
    client, messages = OpenAI(), [{"role": "user", "content": question}]
    for _ in range(4):
        reply = client.chat.completions.create(
            model="policy", messages=messages, tools=[CALCULATE], max_tokens=256
        )
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return "no answer after four turns"


if __name__ == "__main__":
    print(answer(sys.argv[1]))
