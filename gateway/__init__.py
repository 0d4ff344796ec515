"""Where agents talk as if to their LLM provider: every call becomes a step event before its reply ends."""
