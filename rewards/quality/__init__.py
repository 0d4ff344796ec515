"""Quality rules: pure functions of a closed trajectory."""
