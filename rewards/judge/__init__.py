"""Rewards that a language model gives: a rubric, votes, a cache and a budget."""
