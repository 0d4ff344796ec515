"""What the pages show: queries over the lake, and pure functions of their rows."""
