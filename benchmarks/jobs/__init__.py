"""What a step costs the stream jobs and the lake, next to a bare loop and a dictionary."""
