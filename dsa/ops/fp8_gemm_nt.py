"""Matrix product of block-scaled FP8 operands, and the casts of weights. In PyTorch by design."""

from reference import fp8_cast, fp8_gemm

fp8_gemm_nt = fp8_gemm.fp8_gemm_nt
per_block_cast_to_fp8 = fp8_cast.per_block_cast_to_fp8
dequantize_per_block = fp8_cast.dequantize_per_block
