"""The model that learns, its optimiser and its files."""
