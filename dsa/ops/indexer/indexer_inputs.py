"""The lightning indexer's projections in FP8: one kernel quantises the queries, another writes the keys to the
cache."""

import torch

from dsa.kernels.indexer.limits import ROTATED
from dsa.ops.cache._specs import BYTES, SLOTS, check_index_cache, pages_as_rows, slots_and_page_bytes
from dsa.ops.elementwise.rotary import DIMS, check_rotated
from dsa.reference.indexer import indexer_inputs as reference
from dsa.runtime.declare import (
    CONTIGUOUS,
    F32,
    FLOATS,
    INNER,
    PAGES,
    ROWS,
    Arguments,
    Choice,
    Flag,
    Number,
    Tensor,
    dtype_name,
    op,
    unit_inner,
)

__all__ = ["quantize_indexer_queries", "write_indexer_keys"]


def _check_queries(q: torch.Tensor, cos: torch.Tensor) -> None:
    check_rotated("q", q, cos)


def _check_keys(k: torch.Tensor, cos: torch.Tensor) -> None:
    check_rotated("k", k, cos)


ROTATED_PAIRS = tuple(channels // 2 for channels in ROTATED)
_OPTIONS = {"interleaved": Flag(), "dims": Choice(DIMS), "use_ue8m0": Flag()}
QUANTIZE_INDEXER_QUERIES = Arguments(
    rule=_check_queries,
    q=Tensor("T H 128", FLOATS, layout=ROWS),
    weights=Tensor("T H", F32, layout=INNER),
    cos=Tensor("T R/2", F32),
    sin=Tensor("T R/2", F32),
    **_OPTIONS,
)
WRITE_INDEXER_KEYS = Arguments(
    rule=_check_keys,
    first=("cache",),
    k=Tensor("T 128", FLOATS, layout=ROWS),
    norm_weight=Tensor("128", F32, layout=ROWS),
    norm_bias=Tensor("128", F32, layout=ROWS),
    cos=Tensor("T R/2", F32),
    sin=Tensor("T R/2", F32),
    cache=Tensor("pages P 1 132", BYTES, rule=check_index_cache, layout=PAGES, written=True),
    slots=Tensor("T", SLOTS, layout=CONTIGUOUS),
    eps=Number(least=0),
    **_OPTIONS,
)


def quantize_indexer_queries(
    q: torch.Tensor,
    weights: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    dims: str = "first",
    use_ue8m0: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q8, s = FP8(H128 rope(q)) with one scale s per token and head, and w8 = weights s: the queries and weights of the
    scores.

    H128 is the Hadamard transform of 128 channels, and FP8 is the cast `per_token_cast_to_fp8`.

    q            [T, H, 128] bf16, fp16 or fp32: the query projection, last dimension contiguous
    weights      [T, H] fp32
    cos, sin     [T, R / 2] fp32, R at most 128, for the tokens' positions
    interleaved  True: rope rotates the pairs (2i, 2i + 1); False: (i, i + R / 2)
    dims         whether rope rotates the "first" or the "last" R channels
    use_ue8m0    whether scales are powers of two

    Returns q8 [T, H, 128] float8_e4m3fn and w8 [T, H] fp32, both contiguous. sum_h w8 relu(q8 . k) is the score of k in
    `fp8_mqa_logits`. Rope and Hadamard each round to q's dtype. Not differentiable.
    Raises TypeError or ValueError for other types, dtypes and shapes.
    On Hopper: one kernel, R in {32, 64, 128}, rows at multiples of 16 bytes. It gives the bits of the reference on the
    same GPU. CUDA-graph safe, no host synchronisation.
    Source: `Indexer.forward` of DeepSeek-V3.2's inference code.
    """
    return _quantize_indexer_queries(q, weights, cos, sin, interleaved, dims, use_ue8m0)


def write_indexer_keys(
    k: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    eps: float = 1e-6,
    interleaved: bool = False,
    dims: str = "first",
    use_ue8m0: bool = True,
) -> None:
    """Write FP8(H128 rope(LayerNorm(k))) of token t and its scale to slot slots[t] = page * P + offset of the cache, in
    place.

    H128 is the Hadamard transform of 128 channels, and FP8 is the cast `per_token_cast_to_fp8`.

    k            [T, 128] bf16, fp16 or fp32: the key projection, last dimension contiguous
    norm_weight  [128] fp32: weight of the LayerNorm over the 128 channels
    norm_bias    [128] fp32: bias of the LayerNorm
    cos, sin     [T, R / 2] fp32, R at most 128, for the tokens' positions
    cache        [pages, P, 1, 132] uint8, in the layout of `write_indexer_cache`
    slots        [T] int32 or int64; -1 skips the token. Two tokens must not share a slot
    eps          added to the variance: a finite number, at least 0
    interleaved  True: rope rotates the pairs (2i, 2i + 1); False: (i, i + R / 2)
    dims         whether rope rotates the "first" or the "last" R channels
    use_ue8m0    whether scales are powers of two

    LayerNorm, rope and Hadamard each round to k's dtype. No other byte of the cache changes. Raises TypeError or
    ValueError for other types, dtypes and shapes. For a slot below -1 or beyond the cache the reference raises
    ValueError, and the kernel skips the token.
    On Hopper: one kernel, R in {32, 64, 128}, rows and pages at multiples of 16 bytes. The kernel and the reference sum
    the LayerNorm in different orders, so a few values round to an adjacent representable number. CUDA-graph safe, no
    host synchronisation. Source: `Indexer.forward` of DeepSeek-V3.2's inference code.
    """
    _write_indexer_keys(k, norm_weight, norm_bias, cos, sin, cache, slots, eps, interleaved, dims, use_ue8m0)


def _query_results(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q8 = torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=q.device)
    return q8, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)


@op(
    arguments=QUANTIZE_INDEXER_QUERIES,
    reference=reference.quantize_indexer_queries,
    results=_query_results,
    limits={"R/2": ROTATED_PAIRS},
)
def _quantize_indexer_queries(
    q: torch.Tensor,
    weights: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    dims: str,
    use_ue8m0: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    from dsa.kernels.indexer.indexer_inputs_sm90 import compile_quantize_indexer_queries

    q8, scaled = _query_results(q)
    if q8.numel():
        launch = compile_quantize_indexer_queries(
            dtype_name(q.dtype), 2 * cos.shape[1], interleaved, dims == "last", use_ue8m0
        )
        angles = _angle_rows(cos), _angle_rows(sin)
        launch(_without_odd_strides(q), unit_inner(weights), *angles, q8, unit_inner(scaled))
    return q8, scaled


@op(
    arguments=WRITE_INDEXER_KEYS,
    reference=reference.write_indexer_keys,
    limits={"R/2": ROTATED_PAIRS, **slots_and_page_bytes("132")},
)
def _write_indexer_keys(
    k: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    eps: float,
    interleaved: bool,
    dims: str,
    use_ue8m0: bool,
) -> None:
    from dsa.kernels.indexer.indexer_inputs_sm90 import compile_write_indexer_keys

    if k.shape[0] and cache.shape[0]:
        names = dtype_name(k.dtype), dtype_name(slots.dtype)
        launch = compile_write_indexer_keys(*names, 2 * cos.shape[1], interleaved, dims == "last", use_ue8m0)
        k, angles = _without_odd_strides(k), (_angle_rows(cos), _angle_rows(sin))
        launch(k, norm_weight, norm_bias, *angles, pages_as_rows(cache), slots, cache.shape[1], float(eps))


def _angle_rows(x: torch.Tensor) -> torch.Tensor:
    if x.stride(1) != 1 or x.stride(0) % 4 or x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def _without_odd_strides(x: torch.Tensor) -> torch.Tensor:
    """In torch the stride of a dimension of size 1 is arbitrary; for the kernels it must be a multiple of 16 bytes."""
    strides = [s if n > 1 else x.shape[-1] for s, n in zip(x.stride()[:-1], x.shape[:-1])]
    return x if strides == list(x.stride()[:-1]) else x.as_strided(x.shape, (*strides, 1))
