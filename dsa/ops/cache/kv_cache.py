"""Writing latents into cache pages and reading them back."""

import torch

from dsa.ops._aligned import rows_at_16_bytes
from dsa.ops._kernel_arguments import dtype_name
from dsa.ops.cache._kv_rows import cache_rows, check_cache, layout_name, slot_words
from dsa.reference.cache import kv_cache as reference
from dsa.runtime.op import op

__all__ = ["make_v4_cache", "read_kv_cache", "write_kv_cache"]

make_v4_cache = reference.make_v4_cache


def write_kv_cache(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, use_ue8m0: bool = True) -> None:
    """Writes token t's row into slot slots[t] = page * P + offset, in place.

    kv         [T, d] bf16, fp16 or fp32, last dimension contiguous: the latent with its 64 rope channels last
    cache      [pages, P, 1, d] bf16, fp16 or fp32; or bytes (uint8, int8 or float8_e4m3fn), pages any distance apart:
               [pages, P, 1, 656] (V3.2, d = 576): per token 512 e4m3 | 4 fp32 scales | 64 bf16
               [pages, P, 1, 584] (V4, d = 512), each page contiguous: P x (448 e4m3 | 64 bf16), then P x 8 bytes: 7
               ue8m0 scales and a pad
    slots      [T] int32 or int64; -1 skips the token. Two tokens must not share a slot, and kv no memory with the cache
    use_ue8m0  for V3.2, with a scale for 128 channels: True rounds max(amax, 1e-4) / 448 up to a power of two, False
               takes that number as it is. V4 stores powers of two only, a scale for 64 channels: False is refused. A
               float cache has no scales

    A scale multiplies: value = e4m3 * scale. Rope channels are rounded to bf16, and all channels of a float cache to
    its dtype. NaN in a group makes the group's values and its scale NaN. V4's pad byte is written 0; every other byte
    of the cache stays as it is. Not differentiable. Raises TypeError or ValueError for other types, dtypes, shapes and
    strides. For a slot below -1 or beyond the cache the reference raises ValueError; the kernel skips the token.
    On Hopper: one kernel, which writes exactly the reference's bits on that GPU; rows and V4's pages at multiples of 16
    bytes, float rows of a multiple of 8 channels. CUDA-graph safe, no host synchronisation. Source: FlashMLA's caches.
    """
    _write_kv_cache(kv, cache, slots, use_ue8m0)


def read_kv_cache(cache: torch.Tensor, slots: torch.Tensor, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The rows in `slots`: [..., d] in `dtype`, contiguous; value = e4m3 * scale of a byte cache.

    cache  [pages, P, 1, d | 656 | 584], as `write_kv_cache` leaves it; V3.2's fp32 scales multiply in full precision
    slots  [...] int32 or int64, page * P + offset, contiguous; -1 or any slot outside the cache gives zeros
    dtype  float32, or bfloat16 or float16: rounded once, from fp32

    Raises TypeError or ValueError for other types, dtypes, shapes and strides.
    On Hopper it takes what `write_kv_cache` takes.
    """
    return _read_kv_cache(cache, slots, dtype)


@op(
    arguments=reference.WRITE_KV_CACHE,
    reference=reference.write_kv_cache,
    limits=check_cache,
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
    arguments=reference.READ_KV_CACHE,
    reference=reference.read_kv_cache,
    results=_read_results,
    limits=check_cache,
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
