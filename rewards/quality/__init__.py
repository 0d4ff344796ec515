"""Quality rules and readiness: pure, of a closed trajectory and of a candidate.

Below the processes that call them.
"""
