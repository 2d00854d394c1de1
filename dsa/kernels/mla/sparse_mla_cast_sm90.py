"""Sparse MLA attention over 16-bit keys of 512 channels, with the result rotated back and cast to FP8.

o[t, h] = sum_j softmax_j(scale * q[t, h] . k[j]) k[j]

The sum runs over the selected keys j of query t. The last 64 channels of o are rotated by the negative angle of the
query's position. The result is e4m3 with one fp32 scale per 128 channels of a head.

This is sparse_mla_sm90.py with `CastEpilogue` (mla_epilogue.py). Queries are never split, and LSE is not written. The
result is [G, T, h / G * 512]: the h heads are divided into G groups. The grouped GEMM that follows attention in
DeepSeek-V4 reads this layout.
Roofline: as sparse_mla_sm90.py. This epilogue has 500 more instructions per lane than that kernel's and writes half the
bytes: 33 KiB instead of 64 KiB per query and 64 heads. It saves a separate pass that reads, rotates and casts the
result.
"""

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32

from dsa.cute.fake_tensors import cute_dtype, fake, fake_stream, strides
from dsa.cute.quantize import GROUP
from dsa.kernels.mla.limits import DTYPES, HEAD_DIM_V, ROTATED_BACK
from dsa.kernels.mla.mla_epilogue import CastEpilogue, CastResults
from dsa.kernels.mla.sparse_mla_kernel import fake_cache, fake_sink, selections
from dsa.kernels.mla.sparse_mla_sm90 import SparseMlaSm90
from dsa.runtime.compile_cache import cached, compile_sm90


class SparseMlaCastSm90(SparseMlaSm90):
    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        caches: list[cute.Tensor],
        indices: list[cute.Tensor],
        counts: list[cute.Tensor],
        counted: Int32,
        sink: cute.Tensor,
        has_sink: Int32,
        cos: cute.Tensor,
        sin: cute.Tensor,
        out: cute.Tensor,
        out_scale: cute.Tensor,
        scale: Float32,
        workers: Int32,
        full_waves: Int32,
        stream,
    ):
        results = CastResults(out, out_scale, cos, sin, cute.fast_divmod_create_divisor_v2(out.shape[2]))
        self.launch(
            *(q, selections(caches, indices, counts, counted)),
            *(results, sink, has_sink, scale),
            *(Int32(1), workers, full_waves, Int32(0), stream),
        )


@cached
def compile_sparse_mla_cast(dtype: str, lists: int, use_ue8m0: bool):
    """Compile f(q [T, 1, h, 512], caches [pages, P, 512], indices [T, K], counts [T], counted, sink [m], has_sink, cos,
    sin [T, 32] fp32, out [G, T, h / G, 512] e4m3, out_scale [G, T, h / G, 4] fp32, scale * log2(e), workers,
    full_waves).

    The arguments from q to has_sink are as in `SparseMlaKernel` with s_q = 1, and so are workers and full_waves. q and
    caches have `dtype`. full_waves * workers must be at least T, so that no query is split.
    """
    kind = cute_dtype(dtype)
    queries, heads, groups, group_heads = (cute.sym_int() for _ in range(4))
    return compile_sm90(
        SparseMlaCastSm90(HEAD_DIM_V, CastEpilogue(kind, use_ue8m0)),
        fake(kind, (queries, 1, heads, HEAD_DIM_V), (*strides(3, 8), 1)),
        [fake_cache(kind, HEAD_DIM_V) for _ in range(lists)],
        [fake(Int32, (queries, cute.sym_int()), (*strides(1), 1), 4) for _ in range(lists)],
        [fake(Int32, (cute.sym_int(),), (1,), 4) for _ in range(lists)],
        *(Int32(0), *fake_sink()),
        *(fake(Float32, (queries, ROTATED_BACK // 2), (*strides(1), 1), 4) for _ in range(2)),
        fake(Float8E4M3FN, (groups, queries, group_heads, HEAD_DIM_V), (*strides(2, 16), HEAD_DIM_V, 1)),
        fake(Float32, (groups, queries, group_heads, HEAD_DIM_V // GROUP), (*strides(2), HEAD_DIM_V // GROUP, 1), 4),
        *(Float32(0.0), Int32(0), Int32(0), fake_stream()),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Return every (compile function, arguments) that the op can ask for."""
    return [
        (compile_sparse_mla_cast, (dtype, lists, use_ue8m0))
        for dtype in DTYPES
        for lists in (1, 2)
        for use_ue8m0 in (True, False)
    ]
