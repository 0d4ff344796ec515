"""Whether training goes on, as a watch on the lag sees it."""
