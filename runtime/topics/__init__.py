"""Topics: creating them, announcing schemas, decoding records, dead letters."""
