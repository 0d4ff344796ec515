"""The web page over a lake: runs, groups, trajectories, tokens. Reads only."""
