"""The trainer: ready batches in, weight versions out. `main.py` reads from top to bottom."""
