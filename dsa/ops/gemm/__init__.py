"""FP8 products and casts."""
