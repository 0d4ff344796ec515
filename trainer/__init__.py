"""The learner: ready batches in, weight versions out. `loop.py` reads from top to bottom."""
