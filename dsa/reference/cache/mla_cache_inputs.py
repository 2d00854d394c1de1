"""What attention does to its latent projection before it is cached: norm, rope, the cache's own rounding."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.cache.kv_cache import check_write, write_kv_cache
from dsa.reference.checks import (
    FLOATS,
    check_memory,
    check_number,
    check_same_device,
    check_same_dtype,
    check_tensor,
    check_updatable,
    check_writable,
)
from dsa.reference.elementwise.rotary import apply_rotary, check_rotary


@torch.no_grad()
@without_autocast
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
    """Writes rope(RMSNorm(kv)) into token t's slot slots[t] = page * P + offset, in place.

    RMSNorm(x) = x / sqrt(mean(x^2) + eps) * norm_weight on the first N channels, then rope on the last R, which N may
    include: in V3.2 kv is the latent (N = 512) and the rope key (R = 64) behind it; in V4 N = d = 512.

    kv           [T, d] fp32, bf16 or fp16: the projection
    norm_weight  [N] fp32, N at most d
    cos, sin     [T, R / 2] fp32, R at most d: of the tokens' positions
    cache        [pages, P, 1, d | 656 | 584], laid out as `kv_cache` says
    slots        [T] int32 or int64; -1 skips the token. Two tokens must not share a slot
    eps          added to the mean of the squares: a finite number, at least 0
    interleaved  rope turns the pairs (2i, 2i + 1); False: (i, i + R / 2)
    use_ue8m0    as `write_kv_cache` takes it
    out          [T, d] in kv's dtype, or None: gets the rows as they are before the cache rounds them, those of skipped
                 tokens too. Must not overlap kv

    Norm and rope each round to kv's dtype; what the cache stores of that is up to `write_kv_cache`. Every other byte of
    the cache stays as it is. Raises TypeError or ValueError for other types, dtypes, shapes and strides, and for slots
    below -1 or beyond the cache; then nothing is written.
    Source: `MLA.forward` of DeepSeek-V3.2's inference code, and of V4's.
    """
    check_inputs(kv, norm_weight, cos, sin, cache, slots, eps, interleaved, use_ue8m0, out)
    check_memory("cache", cache)
    for name, written in (("cache", cache), ("out", out)):
        if written is not None:
            check_updatable(name, written)
    n = norm_weight.shape[0]
    x = kv[:, :n].float()
    normed = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm_weight).to(kv.dtype)
    row = apply_rotary(torch.cat((normed, kv[:, n:]), 1), cos, sin, interleaved=interleaved, dims="last")
    write_kv_cache(row, cache, slots, use_ue8m0)
    if out is not None:
        out.copy_(row)


def check_inputs(
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
    """The checks of `write_mla_cache`, but for the slots' values."""
    d = check_write(kv, cache, slots, use_ue8m0)
    check_tensor("norm_weight", norm_weight, (torch.float32,), ("N",))
    if not 1 <= norm_weight.shape[0] <= d:
        raise ValueError(f"norm_weight: must have 1 to {d} channels, as kv has them, got {norm_weight.shape[0]}")
    check_number("eps", eps, 0)
    if out is not None:
        check_tensor("out", out, FLOATS, tuple(kv.shape), "kv")
        check_same_dtype(("kv", kv), out=out)
        check_writable("out", out)
    check_same_device(("cache", cache), norm_weight=norm_weight, out=out)
    check_rotary("kv", kv, cos, sin, interleaved, "last")
