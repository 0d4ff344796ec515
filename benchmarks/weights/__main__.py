"""`python -m benchmarks.weights`."""

from benchmarks.weights.benchmark import main

main()
