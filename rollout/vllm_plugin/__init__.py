"""Code that runs inside vLLM's own processes."""
