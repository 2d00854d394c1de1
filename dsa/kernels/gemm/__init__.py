"""CuTe DSL kernels of FP8 products and casts."""
