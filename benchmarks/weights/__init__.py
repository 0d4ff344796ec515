"""The cost of weight versions: full ones, deltas, and the pause of an engine that loads them."""
