"""Exact continuation: which earlier turn a request continues, and the tokens of that turn."""
