"""Export trajectories of the lake to the formats of other trainers and tools."""
