"""Benchmarks of FP8 products and casts."""
