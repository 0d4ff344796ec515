"""Operations: what the installation does now, and its lag over time."""
