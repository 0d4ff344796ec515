"""`python -m benchmarks.trainer`."""

from benchmarks.trainer.benchmark import main

main()
