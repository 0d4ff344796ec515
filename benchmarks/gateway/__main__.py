"""`python -m benchmarks.gateway`."""

from benchmarks.gateway.benchmark import main

main()
