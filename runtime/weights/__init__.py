"""Files of weight versions: deltas, and versions rebuilt from them."""
