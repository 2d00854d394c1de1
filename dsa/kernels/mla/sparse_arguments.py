"""Arguments of the sparse MLA kernels: lists of keys, and results, whole and partial."""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from dsa.cute.fake_tensors import fake, fake_stream, strides
from dsa.kernels.mla.limits import HEAD_DIM_V
from dsa.kernels.mla.topk_gather import Selection


@cute.jit
def selections(caches, indices, counts, counted: Int32):
    """Return the lists of keys; bit i of `counted` says whether list i uses its counts."""
    found = []
    for i, cache in enumerate(caches):
        page_size = cute.fast_divmod_create_divisor_v2(cache.shape[1])
        found.append(Selection(cache, indices[i], counts[i], (counted >> i) & 1, page_size))
    return found


@cute.jit
def of_prefill(q, kv, indices, out, lse):
    """Return prefill's q [T, h, d], kv [s_kv, 1, d], indices [T, 1, K], out [T, h, 512] and lse [T, h] in the
    kernel's layouts: one query per sequence, and all keys in one page.
    """
    q, out = (rearranged(x, (0, 3, 1, 2)) for x in (q, out))
    return q, [rearranged(kv, (1, 0, 2))], [rearranged(indices, (0, 2))], out, rearranged(lse, (0, 1, 2))


@cute.jit
def rearranged(x, modes):
    """Return x with its dimensions in the order `modes`; dimensions that x lacks have size 1."""
    return cute.make_tensor(x.iterator, cute.select(cute.append_ones(x.layout, 4), mode=list(modes)))


def fake_arguments(
    dtype: type[cutlass.Numeric], head_dim: int, lists: int, cache: Callable[[], cute.Tensor], with_max_logits: bool
) -> tuple:
    """Return the fake arguments of a sparse MLA kernel (see `SparseMlaKernel`).

    cache            makes a fake cache
    with_max_logits  use the layouts of prefill
    """
    queries, heads, width = cute.sym_int(), cute.sym_int(), cute.sym_int()
    counts, sink = [fake(Int32, (cute.sym_int(),), (1,), 4) for _ in range(lists)], fake_sink()
    numbers = *(Float32(0.0), Int32(0), Int32(0), Int32(0), Int32(0)), fake_stream()
    results = fake_results(dtype, heads)
    if with_max_logits:
        assert lists == 1
        q = fake(dtype, (queries, heads, head_dim), (*strides(2, 8), 1))
        kv = fake(dtype, (cute.sym_int(), 1, head_dim), (*strides(2, 8), 1))
        indices = fake(Int32, (queries, 1, width), (*strides(2), 1), 4)
        out = fake(dtype, (queries, heads, HEAD_DIM_V), (*strides(1, 8), HEAD_DIM_V, 1))
        lse, max_logits = (fake(Float32, (queries, heads), (*strides(1), 1), 4) for _ in range(2))
        return q, [kv], [indices], counts, Int32(0), *sink, out, lse, *results[2:], max_logits, *numbers
    q = fake(dtype, (queries, 1, heads, head_dim), (*strides(3, 8), 1))
    caches = [cache() for _ in range(lists)]
    indices = [fake(Int32, (queries, cute.sym_int()), (*strides(1), 1), 4) for _ in range(lists)]
    return q, caches, indices, counts, Int32(0), *sink, *results, None, *numbers


def queued_arguments(dtype: type[cutlass.Numeric], head_dim: int) -> tuple[tuple, tuple]:
    """Return the fake arguments of prefill in two parts: (q to has_sink, out to max_logits)."""
    arguments = fake_arguments(dtype, head_dim, 1, lambda: None, with_max_logits=True)
    return arguments[:7], arguments[7:12]


def fake_cache(dtype: type[cutlass.Numeric], head_dim: int) -> cute.Tensor:
    """Return a fake 16-bit cache [pages, P, d]; keys start at multiples of 16 bytes."""
    return fake(dtype, (cute.sym_int(), cute.sym_int(), head_dim), (*strides(2, 8), 1))


def fake_sink() -> tuple:
    """Return sink [m] and has_sink."""
    return fake(Float32, (cute.sym_int(),), (1,), 4), Int32(0)


def fake_results(dtype: type[cutlass.Numeric], heads) -> tuple:
    """Return out [T / s_q, s_q, h, 512], lse [T / s_q, h, s_q], out_partial [splits, 1, h, 512] and
    lse_partial [splits, 1, h].
    """
    batch, group, splits = (cute.sym_int() for _ in range(3))
    return (
        fake(dtype, (batch, group, heads, HEAD_DIM_V), (*strides(2, 8), HEAD_DIM_V, 1)),
        fake(Float32, (batch, heads, group), strides(3), 4),
        fake(Float32, (splits, 1, heads, HEAD_DIM_V), (*strides(2, 4), HEAD_DIM_V, 1)),
        fake(Float32, (splits, 1, heads), (*strides(2), 1), 4),
    )
