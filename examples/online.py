"""Online: no tasks, only the conversations of users. Each line is a message; `+` or `-` rates the
last reply.

    GATEWAY=http://127.0.0.1:8100 CLAWSTREAM_API_KEY=claw-... python examples/online.py

The key needs the scopes agent and reward. The calls of a conversation are one trajectory, because
each begins with the messages of the one before.
"""

import os
import sys

import httpx
from openai import OpenAI

GATEWAY = os.environ.get("GATEWAY", "http://127.0.0.1:8100")
KEY = os.environ.get("CLAWSTREAM_API_KEY", "none")


def rate(step: str, value: float) -> None:
    body = {
        "step_id": step,
        "source": "human",
        "name": "thumb",
        "function_version": "1",
        "value": value,
    }
    headers = {"authorization": f"Bearer {KEY}"}
    httpx.post(f"{GATEWAY}/rewards", json=body, headers=headers).raise_for_status()


def main() -> None:
    client = OpenAI(base_url=f"{GATEWAY}/v1", api_key=KEY)
    messages, step = [], None
    for line in map(str.strip, sys.stdin):
        if line in ("+", "-"):
            if step is not None:
                rate(step, float(line == "+"))
            continue
        messages.append({"role": "user", "content": line})
        reply = client.chat.completions.with_raw_response.create(model="policy", messages=messages)
        step = reply.headers["x-clawstream-step"]
        messages.append(reply.parse().choices[0].message.model_dump(exclude_none=True))
        print(messages[-1].get("content") or "", flush=True)


if __name__ == "__main__":
    main()
