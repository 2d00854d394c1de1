"""Write latents into cache pages and read them back."""

import torch

from dsa.ops.cache._kv_rows import cache_rows, check_cache, layout_name, slot_words
from dsa.ops.cache._specs import CACHE_DTYPES, COUNTED_SLOTS, SLOTS, check_kv_cache, check_scales, row_layout
from dsa.reference.cache import kv_cache as reference
from dsa.runtime.declare import (
    CONTIGUOUS,
    FLOATS,
    MOST_SLOTS,
    ROWS,
    Arguments,
    Dtype,
    Flag,
    Tensor,
    check_positive,
    dtype_name,
    op,
    rows_at_16_bytes,
)

__all__ = ["make_v4_cache", "read_kv_cache", "write_kv_cache"]

WRITE_KV_CACHE = Arguments(
    rule=check_scales,
    first=("cache",),
    kv=Tensor("T d", FLOATS, layout=ROWS),
    cache=Tensor("pages P 1 d", CACHE_DTYPES, rule=check_kv_cache, layout=row_layout, written=True),
    slots=Tensor("T", SLOTS, layout=CONTIGUOUS),
    use_ue8m0=Flag(),
)
READ_KV_CACHE = Arguments(
    cache=Tensor("pages P 1 d", CACHE_DTYPES, rule=check_kv_cache, layout=row_layout),
    slots=Tensor("...", SLOTS, layout=CONTIGUOUS),
    dtype=Dtype(FLOATS),
)


def make_v4_cache(pages: int, page_size: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Return a zeroed V4 cache [pages, page_size, 1, 584] uint8 whose page stride is padded to a multiple of 576 bytes.

    pages * page_size is at most 2^31. Raises TypeError or ValueError for other numbers, and for a device on which torch
    cannot allocate.
    """
    check_positive("pages", pages)
    check_positive("page_size", page_size)
    if pages * page_size > MOST_SLOTS:
        raise ValueError(f"pages: must be at most 2^31 slots, got {pages} of page_size {page_size}")
    _check_device(device)
    return reference.make_v4_cache(pages, page_size, device)


def _check_device(device: object) -> None:
    if device is not None and not isinstance(device, (str, torch.device)):
        raise TypeError(f"device: must be a torch.device, its name or None, got {type(device).__name__}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch raises AssertionError if it was built without CUDA
        raise ValueError(f"device: torch has no {device!r} here: {str(error).splitlines()[0]}") from None


def write_kv_cache(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, use_ue8m0: bool = True) -> None:
    """Write kv[t] into slot slots[t] = page * P + offset of the cache, in place.

    kv         [T, d] bf16, fp16 or fp32, last dimension contiguous: the latent with its 64 rope channels last. kv and
               the cache must not share memory
    cache      [pages, P, 1, d] bf16, fp16 or fp32; or bytes (uint8, int8 or float8_e4m3fn), with any page stride:
               [pages, P, 1, 656] (V3.2, d = 576): per token 512 e4m3 | 4 fp32 scales | 64 bf16
               [pages, P, 1, 584] (V4, d = 512), each page contiguous: P x (448 e4m3 | 64 bf16), then P x 8 bytes: 7
               ue8m0 scales and a pad
    slots      [T] int32 or int64; -1 skips the token. Two tokens must not share a slot
    use_ue8m0  V3.2 has a scale per group of 128 channels. True: it is max(amax, 1e-4) / 448, rounded up to a power of
               two, with amax the largest |value| of the group. False: it is not rounded up. V4 has a scale per group of
               64 channels, always a power of two: False raises ValueError. A float cache has no scales

    A scale multiplies: value = e4m3 * scale. Rope channels of a byte cache are rounded to bf16, and all channels of a
    float cache to the cache's dtype. NaN in a group makes the group's values and scale NaN. V4's pad byte is written 0;
    every other byte of the cache stays as it is. Not differentiable. Raises TypeError or ValueError for other types,
    dtypes, shapes and strides. For a slot below -1 or beyond the cache the reference raises ValueError; the kernel
    skips the token.
    On Hopper: one kernel, bit-identical to the reference on the same GPU; rows and V4's pages at multiples of 16 bytes,
    float rows of a multiple of 8 channels. CUDA-graph safe, no host synchronisation. Source: FlashMLA's caches.
    """
    _write_kv_cache(kv, cache, slots, use_ue8m0)


def read_kv_cache(cache: torch.Tensor, slots: torch.Tensor, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the rows in `slots`: [..., d] in `dtype`, contiguous; value = e4m3 * scale for a byte cache.

    cache  [pages, P, 1, d | 656 | 584], in a layout of `write_kv_cache`; V3.2's fp32 scales are multiplied in fp32
    slots  [...] int32 or int64, page * P + offset, contiguous; -1 or any slot outside the cache gives zeros
    dtype  float32, bfloat16 or float16; for bfloat16 and float16 the fp32 values are rounded once

    Raises TypeError or ValueError for other types, dtypes, shapes and strides.
    On Hopper: the limits of `write_kv_cache` on caches. CUDA-graph safe, no host synchronisation.
    """
    return _read_kv_cache(cache, slots, dtype)


@op(
    arguments=WRITE_KV_CACHE,
    reference=reference.write_kv_cache,
    limits=COUNTED_SLOTS,
    rule=check_cache,
)
def _write_kv_cache(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, use_ue8m0: bool) -> None:
    from dsa.kernels.cache.kv_cache_sm90 import compile_write_kv_cache

    if kv.numel() and cache.numel():
        quantizes = cache.dtype in reference.BYTE_DTYPES
        launch = compile_write_kv_cache(dtype_name(kv.dtype), layout_name(cache), quantizes and use_ue8m0)
        launch(rows_at_16_bytes(kv), cache_rows(cache), slot_words(slots))


def _read_results(cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*slots.shape, reference.row_dim(cache), dtype=dtype, device=cache.device)


@op(
    arguments=READ_KV_CACHE,
    reference=reference.read_kv_cache,
    results=_read_results,
    limits=COUNTED_SLOTS,
    rule=check_cache,
)
def _read_kv_cache(cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    from dsa.kernels.cache.kv_cache_sm90 import compile_read_kv_cache

    out = _read_results(cache, slots, dtype)
    if not cache.numel():
        return out.zero_()
    if out.numel():
        launch = compile_read_kv_cache(layout_name(cache), dtype_name(dtype))
        launch(out.view(-1, out.shape[-1]), cache_rows(cache), slot_words(slots))
    return out
