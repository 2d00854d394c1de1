"""Writing latents into cache pages and reading them back."""

import functools
from collections.abc import Callable

import torch

from dsa import backends
from dsa.ops._kernel_arguments import dtype_name
from dsa.ops.cache._kv_rows import cache_rows, float_rows, layout_name, slot_words
from dsa.reference.cache import kv_cache as reference

make_v4_cache = reference.make_v4_cache


def write_kv_cache(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, use_ue8m0: bool = True) -> None:
    """Writes token t's row into slot slots[t] = page * P + offset, in place.

    kv         [T, d] bf16, fp16 or fp32, last dimension contiguous: the latent with its 64 rope channels last
    cache      [pages, P, 1, d] bf16, fp16 or fp32; or bytes (uint8, int8 or float8_e4m3fn), pages any distance apart:
               [pages, P, 1, 656] (V3.2, d = 576): per token 512 e4m3 | 4 fp32 scales | 64 bf16
               [pages, P, 1, 584] (V4, d = 512), each page contiguous: P x (448 e4m3 | 64 bf16), then P x 8 bytes: 7
               ue8m0 scales and a pad
    slots      [T] int32 or int64; -1 skips the token. Two tokens must not share a slot
    use_ue8m0  V3.2's scales of 128 channels: True rounds max(amax, 1e-4) / 448 up to a power of two, False keeps the
               figure itself. V4's, of 64, are powers of two, and False is refused; a float cache has no scales

    A scale multiplies: value = e4m3 * scale. Rope channels round to bf16, a float cache rounds to its dtype. NaN in a
    group makes its values and its scale NaN. V4's pad is written 0; every other byte of the cache stays as it is. Not
    differentiable. Raises TypeError or ValueError for other types, dtypes, shapes and strides; the reference also for
    slots below -1 or beyond the cache, which the kernel skips.
    On Hopper: one kernel, exactly the bits of the reference on that GPU; rows and V4's pages at multiples of 16 bytes,
    float rows of a multiple of 8 channels. CUDA-graph safe, no host synchronisation. Source: FlashMLA's caches.
    """
    if torch.compiler.is_compiling():
        return torch.ops.dsa.write_kv_cache(kv, cache, slots, use_ue8m0)
    return _write(kv, cache, slots, use_ue8m0)


def read_kv_cache(cache: torch.Tensor, slots: torch.Tensor, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The rows in `slots`: [..., d] in `dtype`, contiguous; value = e4m3 * scale for bytes.

    cache  [pages, P, 1, d | 656 | 584], as `write_kv_cache` leaves it; V3.2's scales count in full precision
    slots  [...] int32 or int64, page * P + offset, contiguous; -1 or any slot outside the cache gives zeros
    dtype  float32, or bfloat16 or float16: rounded once, from fp32

    Raises TypeError or ValueError for other types, dtypes, shapes and strides. On Hopper as `write_kv_cache`.
    """
    if torch.compiler.is_compiling():
        return torch.ops.dsa.read_kv_cache(cache, slots, dtype)
    return _read(cache, slots, dtype)


def _write(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, use_ue8m0: bool) -> None:
    reference.check_write(kv, cache, slots, use_ue8m0)
    if not backends.runs_kernel("write_kv_cache", cache):
        return reference.write_kv_cache(kv, cache, slots, use_ue8m0)
    arguments = float_rows("kv", kv), cache_rows(cache), slot_words(slots)
    if kv.numel() and cache.numel():
        quantizes = cache.dtype in reference.BYTE_DTYPES
        launch = _write_kernel(kv.dtype, layout_name(cache), quantizes and use_ue8m0)
        with backends.on_device(cache):
            launch(*arguments)


def _read(cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    d = reference.check_read(cache, slots, dtype)
    if not backends.runs_kernel("read_kv_cache", cache):
        return reference.read_kv_cache(cache, slots, dtype=dtype)
    rows, words = cache_rows(cache), slot_words(slots)
    out = _allocate(cache, slots, d, dtype)
    if not cache.numel():
        return out.zero_()
    if out.numel():
        launch = _read_kernel(layout_name(cache), dtype)
        with backends.on_device(cache):
            launch(out.view(-1, d), rows, words)
    return out


@functools.cache
def _write_kernel(dtype: torch.dtype, layout: str, use_ue8m0: bool) -> Callable[..., None]:
    from dsa.kernels.cache.kv_cache_sm90 import compile_write_kv_cache

    return compile_write_kv_cache(dtype_name(dtype), layout, use_ue8m0)


@functools.cache
def _read_kernel(layout: str, dtype: torch.dtype) -> Callable[..., None]:
    from dsa.kernels.cache.kv_cache_sm90 import compile_read_kv_cache

    return compile_read_kv_cache(layout, dtype_name(dtype))


def _allocate(cache: torch.Tensor, slots: torch.Tensor, d: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*slots.shape, d, dtype=dtype, device=cache.device)


torch.library.custom_op("dsa::write_kv_cache", mutates_args=("cache",))(_write)
torch.library.custom_op("dsa::read_kv_cache", mutates_args=())(_read)


@torch.library.register_fake("dsa::write_kv_cache")
def _(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, use_ue8m0: bool) -> None:
    reference.check_write(kv, cache, slots, use_ue8m0)


@torch.library.register_fake("dsa::read_kv_cache")
def _(cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _allocate(cache, slots, reference.check_read(cache, slots, dtype), dtype)
