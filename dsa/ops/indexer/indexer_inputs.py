"""The lightning indexer's projections to FP8 in one pass: queries for the scores, keys into the cache."""

import functools
from collections.abc import Callable

import torch

from dsa import backends
from dsa.kernels.indexer.limits import ROTATED
from dsa.ops._kernel_arguments import check_rows, dtype_name, pages_as_rows, unit_inner
from dsa.reference.indexer import indexer_inputs as reference


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
    """q8, s = FP8(H128 rope(q)) with one scale per head; the scale folds into the head's weight: w8 = weights * s.

    q            [T, H, 128] bf16, fp16 or fp32: the query projection, last dimension contiguous
    weights      [T, H] fp32
    cos, sin     [T, R / 2] fp32, R at most 128: of the tokens' positions
    interleaved  rope turns the pairs (2i, 2i + 1); False: (i, i + R / 2)
    dims         rope turns the "first" or the "last" R channels
    use_ue8m0    the scale is a power of two

    Returns q8 [T, H, 128] float8_e4m3fn and w8 [T, H] fp32, contiguous: sum_h w8 relu(q8 . k) is the score of k, as
    `fp8_mqa_logits` computes it. Rope and Hadamard each round to q's dtype. Not differentiable.
    Raises TypeError or ValueError for other types, dtypes and shapes.
    On Hopper: one kernel, R in {32, 64, 128}, rows at multiples of 16 bytes; exactly the bits of the reference on that
    GPU. CUDA-graph safe, no host synchronisation. Source: `Indexer.forward` of DeepSeek-V3.2's inference code.
    """
    if torch.compiler.is_compiling():
        return torch.ops.dsa.quantize_indexer_queries(q, weights, cos, sin, interleaved, dims, use_ue8m0)
    return _quantize(q, weights, cos, sin, interleaved, dims, use_ue8m0)


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
    """Writes FP8(H128 rope(LayerNorm(k))) and its scale into token t's slot slots[t] = page * P + offset, in place.

    k            [T, 128] bf16, fp16 or fp32: the key projection, last dimension contiguous
    norm_weight  [128] fp32, and norm_bias: of the LayerNorm over the 128 channels
    cache        [pages, P, 1, 132] uint8, as `write_indexer_cache` has it
    slots        [T] int32 or int64; -1 skips the token. Two tokens must not share a slot
    eps          added to the variance: a finite number, at least 0
    others       as `quantize_indexer_queries`

    LayerNorm, rope and Hadamard each round to k's dtype. Every other byte of the cache stays as it is. Raises TypeError
    or ValueError for other types, dtypes and shapes; the reference also for slots below -1 or beyond the cache, which
    the kernel skips. On Hopper: one kernel, R in {32, 64, 128}, rows and pages at multiples of 16 bytes; the
    LayerNorm's sums in another order than the reference's, so that now and then a value rounds to its neighbour.
    CUDA-graph safe, no host synchronisation. Source: `Indexer.forward` of DeepSeek-V3.2's inference code.
    """
    arguments = (k, norm_weight, norm_bias, cos, sin, cache, slots, eps, interleaved, dims, use_ue8m0)
    if torch.compiler.is_compiling():
        return torch.ops.dsa.write_indexer_keys(*arguments)
    return _write(*arguments)


def _quantize(
    q: torch.Tensor,
    weights: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    dims: str,
    use_ue8m0: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    reference.check_queries(q, weights, cos, sin, interleaved, dims, use_ue8m0)
    if not backends.runs_kernel("quantize_indexer_queries", q):
        return reference.quantize_indexer_queries(
            q, weights, cos, sin, interleaved=interleaved, dims=dims, use_ue8m0=use_ue8m0
        )
    check_rows("q", q)
    if weights.shape[1] > 1 and weights.stride(1) != 1:
        raise ValueError(f"weights: the last dimension must be contiguous, got strides {list(weights.stride())}")
    cos, sin = _angles(cos, sin)
    q8, scaled = _allocate(q)
    if q8.numel():
        launch = _query_kernel(q.dtype, 2 * cos.shape[1], interleaved, dims == "last", use_ue8m0)
        with backends.on_device(q):
            launch(_without_odd_strides(q), unit_inner(weights), cos, sin, q8, unit_inner(scaled))
    return q8, scaled


def _write(
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
    reference.check_keys(k, norm_weight, norm_bias, cos, sin, cache, slots, eps, interleaved, dims, use_ue8m0)
    if not backends.runs_kernel("write_indexer_keys", cache):
        return reference.write_indexer_keys(
            *(k, norm_weight, norm_bias, cos, sin, cache, slots),
            **{"eps": eps, "interleaved": interleaved, "dims": dims, "use_ue8m0": use_ue8m0},
        )
    for name, x in (("k", k), ("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        check_rows(name, x)
    if slots.shape[0] > 1 and slots.stride(0) != 1:
        raise ValueError(f"slots: must be contiguous, got strides {list(slots.stride())}")
    pages = pages_as_rows("cache", cache)
    cos, sin = _angles(cos, sin)
    if k.shape[0] and cache.shape[0]:
        launch = _key_kernel(k.dtype, slots.dtype, 2 * cos.shape[1], interleaved, dims == "last", use_ue8m0)
        with backends.on_device(cache):
            k = _without_odd_strides(k)
            launch(k, norm_weight, norm_bias, cos, sin, pages, slots, cache.shape[1], float(eps))


def _angles(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin with rows at multiples of 16 bytes; copied where they are not, being small."""
    if 2 * cos.shape[1] not in ROTATED:
        raise ValueError(f"cos: the Hopper kernel rotates R {ROTATED} channels, got {2 * cos.shape[1]}")

    def aligned(x: torch.Tensor) -> torch.Tensor:
        if x.stride(1) != 1 or x.stride(0) % 4 or x.data_ptr() % 16:
            return x.clone(memory_format=torch.contiguous_format)
        return x

    return aligned(cos), aligned(sin)


def _without_odd_strides(x: torch.Tensor) -> torch.Tensor:
    """x with a multiple of its row length as the stride of dimensions of size 1, which may have any."""
    strides = [s if n > 1 else x.shape[-1] for s, n in zip(x.stride()[:-1], x.shape[:-1])]
    return x if strides == list(x.stride()[:-1]) else x.as_strided(x.shape, (*strides, 1))


@functools.cache
def _query_kernel(
    dtype: torch.dtype, rotated: int, interleaved: bool, last: bool, use_ue8m0: bool
) -> Callable[..., None]:
    from dsa.kernels.indexer.indexer_inputs_sm90 import compile_quantize_indexer_queries

    return compile_quantize_indexer_queries(dtype_name(dtype), rotated, interleaved, last, use_ue8m0)


@functools.cache
def _key_kernel(
    dtype: torch.dtype, slot_dtype: torch.dtype, rotated: int, interleaved: bool, last: bool, use_ue8m0: bool
) -> Callable[..., None]:
    from dsa.kernels.indexer.indexer_inputs_sm90 import compile_write_indexer_keys

    names = dtype_name(dtype), dtype_name(slot_dtype)
    return compile_write_indexer_keys(*names, rotated, interleaved, last, use_ue8m0)


def _allocate(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q8 = torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=q.device)
    return q8, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)


torch.library.custom_op("dsa::quantize_indexer_queries", mutates_args=())(_quantize)
torch.library.custom_op("dsa::write_indexer_keys", mutates_args=("cache",))(_write)


@torch.library.register_fake("dsa::quantize_indexer_queries")
def _(
    q: torch.Tensor,
    weights: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    dims: str,
    use_ue8m0: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    reference.check_queries(q, weights, cos, sin, interleaved, dims, use_ue8m0)
    return _allocate(q)


@torch.library.register_fake("dsa::write_indexer_keys")
def _(
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
    reference.check_keys(k, norm_weight, norm_bias, cos, sin, cache, slots, eps, interleaved, dims, use_ue8m0)
