"""Engines: discovery, health, routing and HTTP to them."""
