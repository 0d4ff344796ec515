"""`python -m benchmarks.jobs`."""

from benchmarks.jobs.benchmark import main

main()
