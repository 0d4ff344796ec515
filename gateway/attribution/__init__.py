"""Which trajectory and session a request belongs to, and which agent sent it."""
