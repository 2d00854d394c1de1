"""Small-M products with a matrix of 16-bit numbers, with fp32 results.

Plan: the small-M product of dsa/cute/small_m_product.py. linear_fp32_limits.py decides whether a cluster or a single
CTA computes a tile.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32

from dsa.cute.fake_tensors import cute_dtype, fake_rows, fake_stream
from dsa.cute.small_m_product import ROUND, SmallMProduct
from dsa.kernels.gemm.linear_fp32_limits import CHANNEL_MULTIPLE, DTYPES
from dsa.runtime.compile_cache import Variants, cached, compile_sm90


@cached
def compile_linear_fp32(dtype: str, config: tuple[int, int]):
    """-> f(x [T, I] dtype, weight [O, I] dtype, y fp32 [T, O], scale, scaled_from), which computes y = x weight^T.

    config: (tokens per tile, CTAs per tile). T, O > 0; I is a multiple of 32, and at least 2048 with one CTA per tile.
    Rows of x and weight are aligned to 16 bytes; y is contiguous. Columns of y from `scaled_from` on are multiplied by
    `scale`.
    """
    element, tokens, rows = cute_dtype(dtype), cute.sym_int(), cute.sym_int()
    channels = cute.sym_int(divisibility=CHANNEL_MULTIPLE)
    return compile_sm90(
        SmallMProduct(element, *config),
        fake_rows(element, tokens, channels),
        fake_rows(element, rows, channels),
        fake_rows(Float32, tokens, rows, align=4),
        *(Float32(1.0), Int32(0), fake_stream()),
    )


def shipped_variants() -> Variants:
    return [(compile_linear_fp32, (dtype, (tokens, ctas))) for dtype in DTYPES for ctas, tokens in ROUND]
