"""FP8 and FP4 GEMM: quantised products, casts, and small products in fp32."""
