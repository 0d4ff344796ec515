"""HTTP gateway between agents and engines.

Records each model call as step events before its reply ends.
"""
