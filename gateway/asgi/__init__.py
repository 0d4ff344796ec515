"""HTTP and ASGI plumbing without domain logic."""
