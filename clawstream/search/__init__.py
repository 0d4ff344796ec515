"""The full-text index of recorded requests and replies."""
