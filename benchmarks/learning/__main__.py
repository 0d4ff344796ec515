"""`python -m benchmarks.learning`."""

from benchmarks.learning.benchmark import main

main()
