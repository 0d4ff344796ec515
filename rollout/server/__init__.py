"""One vLLM server as a process, and loading weight versions into it."""
