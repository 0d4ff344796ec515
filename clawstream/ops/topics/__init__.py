"""Topic operations: copy to another prefix, and trim what no run needs."""
