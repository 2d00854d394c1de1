"""Benchmarks of norm, rotary embedding and hyper connections."""
