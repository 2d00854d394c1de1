"""Ops bridges of FP8 products and casts."""
