"""`python -m benchmarks.inspector`."""

from benchmarks.inspector.benchmark import main

main()
