"""The capacity plan: the cost of a number of steps a day, and the lag under bursts and failures."""
