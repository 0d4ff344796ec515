"""Policy losses: (whole sequences, settings) -> loss of each token, shape (tokens,)."""
