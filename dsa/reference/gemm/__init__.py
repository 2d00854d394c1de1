"""PyTorch references of FP8 products and casts."""
