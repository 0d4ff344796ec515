"""The stream jobs: steps and rewards become trajectories and candidates (assemble), rewards (reward), batches (admit), tables (lake)."""
