"""Norm and rope of the attention's latents, and the write to the cache."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.cache.kv_cache import BYTE_DTYPES, read_kv_cache, write_kv_cache
from dsa.reference.elementwise.rotary import apply_rotary


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
    """Write rope(RMSNorm(kv)) of token t to its slot slots[t] = page * P + offset, in place.

    RMSNorm(x) = x / sqrt(mean(x^2) + eps) * norm_weight on the first N channels, then rope on the last R channels. In
    V3.2 kv is the latent (N = 512) followed by the rope key (R = 64); in V4 N = d = 512 includes the last R channels.

    Norm and rope each round to kv's dtype, then `write_kv_cache` stores the rows. Slot -1 skips the token. No other
    byte of the cache changes. out receives the rows of all tokens, also of skipped ones: with a float cache before the
    cache rounds them, with a byte cache as `read_kv_cache` would return them in kv's dtype. Raises ValueError for slots
    below -1 or beyond the cache, and then writes nothing. Arguments as in `dsa.write_mla_cache`.
    Source: `MLA.forward` of DeepSeek-V3.2's inference code, and of V4's.
    """
    n = norm_weight.shape[0]
    x = kv[:, :n].float()
    normed = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm_weight).to(kv.dtype)
    row = apply_rotary(torch.cat((normed, kv[:, n:]), 1), cos, sin, interleaved=interleaved, dims="last")
    write_kv_cache(row, cache, slots, use_ue8m0)
    if out is not None:
        out.copy_(_as_read(row, cache, use_ue8m0) if cache.dtype in BYTE_DTYPES else row)


def _as_read(rows: torch.Tensor, cache: torch.Tensor, use_ue8m0: bool) -> torch.Tensor:
    """Return the rows [T, d] as `read_kv_cache` returns them from a cache like this."""
    page = torch.empty(1, max(len(rows), 1), 1, cache.shape[3], dtype=torch.uint8, device=cache.device)
    slots = torch.arange(len(rows), device=cache.device)
    write_kv_cache(rows, page, slots, use_ue8m0)
    return read_kv_cache(page, slots, dtype=rows.dtype)
