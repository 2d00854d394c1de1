"""Sparse MLA prefill with up to 16 heads over selected 16-bit keys, for a queue of single queries.

This is sparse_mla_swap_ab_sm90.py, except that a queue lists the queries to compute. These are the queries of groups
that share too few keys or list a key twice (selection_union_sm90.py), and of groups for which sparse_mla_union_sm90.py
got a NaN or an infinity in O.
"""

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from dsa.cute.fake_tensors import cute_dtype, fake, fake_stream
from dsa.kernels.mla.limits import DTYPES, GROUP_SIZES, SPARSE_HEAD_DIMS
from dsa.kernels.mla.mla_roles import Results
from dsa.kernels.mla.sparse_mla_kernel import of_prefill, queued_arguments, selections
from dsa.kernels.mla.sparse_mla_swap_ab_sm90 import SparseMlaSwapAbSm90
from dsa.kernels.mla.tile_scheduler import Queue
from dsa.runtime.compile_cache import cached, compile_sm90


class SparseMlaQueuedSm90(SparseMlaSwapAbSm90):
    """Sparse MLA attention of a queue of queries.

    f(q [T, h, d], kv [s_kv, 1, d], indices [T, 1, K], counts [n], has_counts, sink [m], has_sink, out
    [T, h, 512], lse [T, h], out_partial, lse_partial, max_logits [T, h], scale * log2(e), workers, queued
    [2], queries [T]).

    The arguments up to `workers` are as in `SparseMlaKernel` with max_logits and one list of keys; has_counts is the
    `counted` of that class. No query is split, so out_partial and lse_partial are not written. The kernel of
    `compile_selection_union` and then the kernel of `SparseMlaUnionSm90` write `queued` and `queries`: the first
    queued[1] entries of `queries` are the queries to compute, in any order. Only these queries' rows of out, lse and
    max_logits are written.
    """

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        kv: cute.Tensor,
        indices: cute.Tensor,
        counts: cute.Tensor,
        has_counts: Int32,
        sink: cute.Tensor,
        has_sink: Int32,
        out: cute.Tensor,
        lse: cute.Tensor,
        out_partial: cute.Tensor,
        lse_partial: cute.Tensor,
        max_logits: cute.Tensor,
        scale: Float32,
        workers: Int32,
        queued: cute.Tensor,
        queries: cute.Tensor,
        stream,
    ):
        q, caches, indices, out, lse = of_prefill(q, kv, indices, out, lse)
        self.launch(
            *(q, selections(caches, indices, [counts], has_counts)),
            *(Results(out, lse, out_partial, lse_partial, max_logits), sink, has_sink, scale),
            *(Int32(1), workers, Int32(0), Int32(0), stream, Queue(queries, queued, 1), q.shape[0]),
        )


@cached
def compile_sparse_mla_queued(dtype: str, head_dim: int):
    """Compile f, see `SparseMlaQueuedSm90`, for h <= 16."""
    kind = cute_dtype(dtype)
    (q, [kv], [indices], [counts], counted, *sinks), results = queued_arguments(kind, head_dim)
    return compile_sm90(
        SparseMlaQueuedSm90(kind, head_dim, max(GROUP_SIZES), with_max_logits=True),
        *(q, kv, indices, counts, counted, *sinks, *results),
        *(Float32(0.0), Int32(1)),
        *(fake(Int32, (n,), (1,), 4) for n in (2, q.shape[0])),
        fake_stream(),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Return every (compile function, arguments) that the op can ask for."""
    return [(compile_sparse_mla_queued, (dtype, head_dim)) for head_dim in SPARSE_HEAD_DIMS for dtype in DTYPES]
