"""Advantage estimators: (batch, settings) -> advantage of each token, shape (tokens,)."""
