#!/bin/sh
# An agent as it is: Claude Code reads ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, which flow exec sets.
# Further words go to flow exec, for example: sh examples/claude_code.sh --eval limit=2
here=$(dirname "$0")
exec python -m clawstream flow exec tasks="$here/arithmetic.jsonl" \
    reward="$here/grade.py:grade" concurrency=4 "$@" \
    -- env ANTHROPIC_MODEL=policy claude -p "{question} Answer with the number only."
