"""The worker shell around the jobs: Faust, fetch buffers, waiting for schemas."""
