"""What attention does to its latent projection before it is cached: norm, rope, the cache's own rounding."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.cache.indexer_cache import SLOTS
from dsa.reference.cache.kv_cache import (
    BYTE_DTYPES,
    CACHE_DTYPES,
    check_kv_cache,
    check_scales,
    read_kv_cache,
    row_layout,
    write_kv_cache,
)
from dsa.reference.elementwise.rotary import apply_rotary, check_rotated
from dsa.runtime.arguments import CONTIGUOUS, F32, ROWS, Arguments, Flag, Number, Tensor
from dsa.runtime.checks import FLOATS, check_memory, check_updatable


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

    Norm and rope each round to kv's dtype; what the cache stores of that is up to `write_kv_cache`. Every other byte of
    the cache stays as it is. out gets the rows of all tokens, those of a cache of bytes as it gives them back. Raises
    ValueError for slots below -1 or beyond the cache, too; nothing is then written. Arguments as of
    `dsa.write_mla_cache`.
    Source: `MLA.forward` of DeepSeek-V3.2's inference code, and of V4's.
    """
    WRITE_MLA_CACHE.check(kv, norm_weight, cos, sin, cache, slots, eps, interleaved, use_ue8m0, out)
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
        out.copy_(_as_read(row, cache, use_ue8m0) if cache.dtype in BYTE_DTYPES else row)


def _as_read(rows: torch.Tensor, cache: torch.Tensor, use_ue8m0: bool) -> torch.Tensor:
    """The rows [T, d] as a cache of that layout gives them back."""
    page = torch.empty(1, max(len(rows), 1), 1, cache.shape[3], dtype=torch.uint8, device=cache.device)
    slots = torch.arange(len(rows), device=cache.device)
    write_kv_cache(rows, page, slots, use_ue8m0)
    return read_kv_cache(page, slots, dtype=rows.dtype)
