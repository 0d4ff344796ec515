"""Event handlers: map one record of an input to state changes, or reject it. Pure."""
