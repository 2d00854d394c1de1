"""Copies between rows and the indexer's key cache: read_indexer_cache gathers rows from cache pages,
write_indexer_cache scatters rows to them.

Plan
- D / 16 lanes per token copy 16 bytes each, and one of them also copies the scale. A fast division, with constants that
  the host computes from page_size, gives the page and offset of a slot.
- For a slot outside the cache, a read gives zeros and a write does nothing.
Shared memory: none. Constraints: D a multiple of 16, rows and pages at multiples of 16 bytes.
Roofline: bound by memory: per token, D + 4 bytes are read and written, and 4 or 8 bytes of the slot are read.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, const_expr

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake, fake_rows, fake_stream, strides
from dsa.cute.indexer_page import find_slot, page_planes
from dsa.cute.registers import filled, loaded
from dsa.cute.sm90 import thread_and_cta
from dsa.kernels.cache.limits import INDEX_HEAD_DIMS
from dsa.runtime.compile_cache import Variants, cached, compile_sm90

BYTES = 16  # per lane
THREADS = 256


class IndexerCacheSm90:
    def __init__(self, dim: int, write: bool):
        self.dim, self.write = dim, write
        self.lanes = dim // BYTES

    @cute.jit
    def __call__(
        self, k: cute.Tensor, k_scale: cute.Tensor, cache: cute.Tensor, slots: cute.Tensor, page_size: Int32, stream
    ):
        divisor = cute.fast_divmod_create_divisor_v2(page_size)
        self.kernel(k, k_scale, cache, slots, divisor, page_size).launch(
            grid=(cute.ceil_div(k.shape[0], THREADS // self.lanes), 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        k: cute.Tensor,
        k_scale: cute.Tensor,
        cache: cute.Tensor,
        slots: cute.Tensor,
        divisor: cute.FastDivmodDivisorV2,
        page_size: Int32,
    ):
        tid, block = thread_and_cta()
        lane = tid % self.lanes
        t = block * (THREADS // self.lanes) + tid // self.lanes
        wait_for_prerequisite_grids()
        if t < k.shape[0]:
            exists, page, offset = find_slot(cache, slots[t], page_size, divisor)
            values, scales = page_planes(cache, page, page_size, self.dim, Uint8)
            row = cute.local_tile(k[t, None], (BYTES,), (lane,))
            place = cute.local_tile(values[offset, None], (BYTES,), (lane,))
            if const_expr(self.write):
                if exists:
                    cute.autovec_copy(loaded(row), place)
                    if lane == 0:
                        scales[offset] = k_scale[t]
            else:
                part = filled((BYTES,), 0, Uint8)
                scale = Float32(0.0)
                if exists:
                    cute.autovec_copy(place, part)
                    scale = scales[offset]
                cute.autovec_copy(part, row)
                if lane == 0:
                    k_scale[t] = scale


@cached
def compile_indexer_cache(dim: int, slot_dtype: str, write: bool):
    """-> f(k [T, D] uint8, k_scale [T] fp32, cache [pages, bytes] uint8, slots [T] slot_dtype, page_size); T, pages >
    0. k has the bytes of e4m3 keys. With `write`, f copies k and k_scale to the slots of the cache. Otherwise f copies
    the slots' keys and scales to k and k_scale. Rows of k and pages start at multiples of 16 bytes."""
    tokens = cute.sym_int()
    return compile_sm90(
        IndexerCacheSm90(dim, write),
        fake_rows(Uint8, tokens, dim),
        fake(Float32, (tokens,), strides(1), 4),
        fake_rows(Uint8, cute.sym_int(), cute.sym_int()),
        fake(cute_dtype(slot_dtype), (tokens,), (1,), 4),
        *(Int32(1), fake_stream()),
    )


def shipped_variants() -> Variants:
    return [
        (compile_indexer_cache, (dim, slots, write))
        for dim in INDEX_HEAD_DIMS
        for slots in ("int32", "int64")
        for write in (True, False)
    ]
