"""What the kernels of sparse MLA attention are called with: lists of keys, and results, whole and partial."""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from dsa.cute.fake_tensors import fake, fake_stream, strides
from dsa.kernels.mla.limits import HEAD_DIM_V
from dsa.kernels.mla.topk_gather import Selection


@cute.jit
def selections(caches, indices, counts, counted: Int32):
    """The lists; bit i of counted: of list i not all indices count."""
    found = []
    for i, cache in enumerate(caches):
        page_size = cute.fast_divmod_create_divisor_v2(cache.shape[1])
        found.append(Selection(cache, indices[i], counts[i], (counted >> i) & 1, page_size))
    return found


def fake_arguments(
    dtype: type[cutlass.Numeric], head_dim: int, lists: int, cache: Callable[[], cute.Tensor], with_max_logits: bool
) -> tuple:
    """All arguments of a kernel of sparse MLA attention: see `SparseMlaKernel`; cache() makes a cache."""
    queries, heads = cute.sym_int(), cute.sym_int()
    return (
        fake(dtype, (queries, 1, heads, head_dim), (*strides(3, 8), 1)),
        [cache() for _ in range(lists)],
        [fake(Int32, (queries, cute.sym_int()), (*strides(1), 1), 4) for _ in range(lists)],
        [fake(Int32, (cute.sym_int(),), (1,), 4) for _ in range(lists)],
        Int32(0),
        *fake_sink(),
        *fake_results(dtype, heads),
        fake(Float32, (queries, heads), (*strides(1), 1), 4) if with_max_logits else None,
        *(Float32(0.0), Int32(0), Int32(0), Int32(0), Int32(0)),
        fake_stream(),
    )


def fake_cache(dtype: type[cutlass.Numeric], head_dim: int) -> cute.Tensor:
    """[pages, P, d] in 16 bits; keys start at multiples of 16 bytes."""
    return fake(dtype, (cute.sym_int(), cute.sym_int(), head_dim), (*strides(2, 8), 1))


def fake_sink() -> tuple:
    """sink [m], has_sink."""
    return fake(Float32, (cute.sym_int(),), (1,), 4), Int32(0)


def fake_results(dtype: type[cutlass.Numeric], heads) -> tuple:
    """out [T / s_q, s_q, h, 512], lse [T / s_q, h, s_q], out_partial [splits, 1, h, 512], lse_partial [splits, 1,
    h]."""
    batch, group, splits = (cute.sym_int() for _ in range(3))
    return (
        fake(dtype, (batch, group, heads, HEAD_DIM_V), (*strides(2, 8), HEAD_DIM_V, 1)),
        fake(Float32, (batch, heads, group), (*strides(2), 1), 4),
        fake(Float32, (splits, 1, heads, HEAD_DIM_V), (*strides(2, 4), HEAD_DIM_V, 1)),
        fake(Float32, (splits, 1, heads), (*strides(2), 1), 4),
    )
