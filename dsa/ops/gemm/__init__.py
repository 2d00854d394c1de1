"""FP8 and FP4 GEMM: products of quantised matrices, casts, and small products with fp32 results."""
