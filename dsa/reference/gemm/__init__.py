"""PyTorch references of matrix products and FP8 casts."""
