"""Benchmarks of matrix products, most of them in FP8, and of FP8 casts."""
