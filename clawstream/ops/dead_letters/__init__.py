"""Dead letters: listing, repairing and sending them again."""
