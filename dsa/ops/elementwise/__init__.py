"""Norms, rope, hyper connections: single ops, and fusions with each other and with casts."""
