"""The hot path: a model call from the client's bytes to its reply."""
