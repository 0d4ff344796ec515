"""Advantages and losses: one small pure file each."""
