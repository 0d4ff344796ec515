"""API keys, their scopes and their limits."""
