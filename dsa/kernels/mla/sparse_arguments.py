"""What the kernels of sparse MLA attention are called with: lists of keys, and results, whole and partial."""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from dsa.cute.fake_tensors import fake, strides
from dsa.kernels.mla.mla_tiles import VALUE
from dsa.kernels.mla.topk_gather import Selection


@cute.jit
def selections(caches, indices, counts, counted: Int32):
    """The lists; bit i of counted: of list i not all indices count."""
    found = []
    for i, cache in enumerate(caches):
        page_size = cute.fast_divmod_create_divisor_v2(cache.shape[1])
        found.append(Selection(cache, indices[i], counts[i], (counted >> i) & 1, page_size))
    return found


def fake_lists(queries, lists: int, cache: Callable[[], cute.Tensor]) -> tuple:
    """caches, indices [T, K], counts [n], counted."""
    return (
        [cache() for _ in range(lists)],
        [fake(Int32, (queries, cute.sym_int()), (*strides(1), 1), 4) for _ in range(lists)],
        [fake(Int32, (cute.sym_int(),), (1,), 4) for _ in range(lists)],
        Int32(0),
    )


def fake_sink() -> tuple:
    """sink [m], has_sink."""
    return fake(Float32, (cute.sym_int(),), (1,), 4), Int32(0)


def fake_results(dtype: type[cutlass.Numeric], heads) -> tuple:
    """out [T / s_q, s_q, h, 512], lse [T / s_q, h, s_q], out_parts [slots, 1, h, 512], lse_parts [slots, 1, h]."""
    batch, group, slots = (cute.sym_int() for _ in range(3))
    return (
        fake(dtype, (batch, group, heads, VALUE), (*strides(2, 8), VALUE, 1), 16),
        fake(Float32, (batch, heads, group), (*strides(2), 1), 4),
        fake(Float32, (slots, 1, heads, VALUE), (*strides(2, 4), VALUE, 1), 16),
        fake(Float32, (slots, 1, heads), (*strides(2), 1), 4),
    )
