"""A trajectory's tokens: cache, segment tree, trainability."""
