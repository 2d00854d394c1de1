"""Norm, rope and quantisation of attention's latent projection into the cache, in one pass."""

import torch

from dsa.kernels.cache.limits import LATENT_CHANNELS, NORM_CHANNELS, ROPE_CHANNELS
from dsa.ops.cache._kv_rows import cache_rows, check_cache, layout_name, slot_words
from dsa.ops.cache._specs import CACHE_DTYPES, COUNTED_SLOTS, SLOTS, check_kv_cache, check_scales, row_layout
from dsa.ops.elementwise.rotary import check_rotated
from dsa.reference.cache import mla_cache_inputs as reference
from dsa.reference.cache.kv_cache import BYTE_DTYPES
from dsa.runtime.declare import (
    CONTIGUOUS,
    F32,
    FLOATS,
    ROWS,
    Arguments,
    Flag,
    Number,
    Tensor,
    check_apart,
    dtype_name,
    op,
    rows_at_16_bytes,
)

__all__ = ["write_mla_cache"]


def _check_inputs(
    kv: torch.Tensor, norm_weight: torch.Tensor, cos: torch.Tensor, cache: torch.Tensor, use_ue8m0: bool
) -> None:
    d = kv.shape[1]
    if not 1 <= norm_weight.shape[0] <= d:
        raise ValueError(f"norm_weight: must have 1 to {d} channels, as kv has them, got {norm_weight.shape[0]}")
    check_rotated("kv", kv, cos)
    check_scales(cache, use_ue8m0)


WRITE_MLA_CACHE = Arguments(
    rule=_check_inputs,
    first=("cache",),
    kv=Tensor("T d", FLOATS, layout=ROWS),
    norm_weight=Tensor("N", F32, layout=ROWS),
    cos=Tensor("T R/2", F32),
    sin=Tensor("T R/2", F32),
    cache=Tensor("pages P 1 d", CACHE_DTYPES, rule=check_kv_cache, layout=row_layout, written=True),
    slots=Tensor("T", SLOTS, layout=CONTIGUOUS),
    eps=Number(least=0),
    interleaved=Flag(),
    use_ue8m0=Flag(),
    out=Tensor("T d", FLOATS, like="kv", optional=True, written=True, layout=ROWS),
)


def write_mla_cache(
    kv: torch.Tensor,
    norm_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    eps: float = 1e-6,
    interleaved: bool = True,
    use_ue8m0: bool = True,
    out: torch.Tensor | None = None,
) -> None:
    """Write rope(RMSNorm(kv)) of token t into slot slots[t] = page * P + offset of the cache, in place.

    RMSNorm(x) = x / sqrt(mean(x^2) + eps) * norm_weight on the first N channels, then rope on the last R channels. The
    two ranges may overlap: in V3.2 kv is the latent (N = 512) followed by the rope key (R = 64); in V4 N = d = 512.

    kv           [T, d] bf16, fp16 or fp32, last dimension contiguous: the projection
    norm_weight  [N] fp32, N at most d
    cos, sin     [T, R / 2] fp32, R at most d, for the tokens' positions
    cache        [pages, P, 1, d | 656 | 584], in a layout of `write_kv_cache`
    slots        [T] int32 or int64; -1 skips the token. Two tokens must not share a slot
    eps          added to the mean of the squares: a finite number, at least 0
    interleaved  True: rope rotates the pairs (2i, 2i + 1); False: (i, i + R / 2)
    use_ue8m0    the same as in `write_kv_cache`
    out          [T, d] in kv's dtype, last dimension contiguous, or None: receives the rows of all tokens, also of
                 skipped tokens. With a byte cache: the bits that `read_kv_cache` returns in kv's dtype after the write.
                 With a float cache: the rows before the cache rounds them. Must not overlap kv or the cache

    Norm and rope each round to kv's dtype, as `rms_norm` and `apply_rotary` do; the rows are then stored as by
    `write_kv_cache`. Every other byte of the cache stays as it is. Not differentiable. Raises TypeError or ValueError
    for other types, dtypes, shapes and strides. For a slot below -1 or beyond the cache the reference raises
    ValueError; the kernel skips the token.
    On Hopper: one kernel, d 576 or 512, N 512, R 64; rows of kv and out, norm_weight, and the cache's rows (V4: pages)
    start at multiples of 16 bytes. The kernel sums the squares in another order than the reference, so a value
    occasionally rounds to an adjacent representable number. CUDA-graph safe, no host synchronisation.
    Source: `MLA.forward` of DeepSeek-V3.2's inference code, and of V4's.
    """
    if out is not None:
        check_apart("out", out, kv=kv, cache=cache)
    _write_mla_cache(kv, norm_weight, cos, sin, cache, slots, eps, interleaved, use_ue8m0, out)


@op(
    arguments=WRITE_MLA_CACHE,
    reference=reference.write_mla_cache,
    limits={"d": LATENT_CHANNELS, "N": (NORM_CHANNELS,), "R/2": (ROPE_CHANNELS // 2,), **COUNTED_SLOTS},
    rule=check_cache,
)
def _write_mla_cache(
    kv: torch.Tensor,
    norm_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    eps: float,
    interleaved: bool,
    use_ue8m0: bool,
    out: torch.Tensor | None,
) -> None:
    from dsa.kernels.cache.kv_cache_sm90 import compile_write_mla_cache

    if kv.shape[0] and (cache.shape[0] or out is not None):
        quantizes = cache.dtype in BYTE_DTYPES
        launch = compile_write_mla_cache(
            dtype_name(kv.dtype), layout_name(cache), kv.shape[1], interleaved, quantizes and use_ue8m0
        )
        rows, pages, words = rows_at_16_bytes(kv), cache_rows(cache), slot_words(slots)
        # Without `out` the kernel gets kv's rows, which it does not write.
        kept = rows if out is None else rows_at_16_bytes(out)
        launch(rows, norm_weight, cos, sin, pages, words, kept, int(out is not None), float(eps))
