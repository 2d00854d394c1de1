"""Norms, rope, hyper connections: separate ops, and ops that fuse them with each other or with casts."""
