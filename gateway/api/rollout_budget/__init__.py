"""The rollout budget of a run: replacements wanted and free staleness capacity."""
