"""The trained model, its optimiser and its files."""
