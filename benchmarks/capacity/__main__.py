"""`python -m benchmarks.capacity`."""

from benchmarks.capacity.plan import main

main()
