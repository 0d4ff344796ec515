"""Replay: a window of topics or of the lake through assemble, reward and admit again."""
