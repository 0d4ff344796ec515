"""Rewards of a discriminative model: a sequence classifier, here or at an endpoint."""
