"""CuTe DSL kernels of products (FP8, FP8 with FP4 weights, 16-bit with fp32 results) and of casts to FP8."""
