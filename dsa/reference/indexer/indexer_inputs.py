"""The preparation of the lightning indexer's queries and keys for scoring: LayerNorm (keys only), rope, Hadamard
transform, and the cast to FP8."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.cache.indexer_cache import write_indexer_cache
from dsa.reference.elementwise.rotary import apply_rotary
from dsa.reference.gemm.fp8_cast import per_token_cast_to_fp8


@torch.no_grad()
@without_autocast
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
    """q8, s = FP8(H128 rope(q)) with one scale s per token and head, and w8 = weights s, so that the scores need no s.

    H128 is the Hadamard transform of 128 channels, and FP8 is the cast `per_token_cast_to_fp8`. Returns (q8, w8). Rope
    and Hadamard each round to q's dtype. Arguments as in `dsa.quantize_indexer_queries`.
    Source: `Indexer.forward` of DeepSeek-V3.2's inference code.
    """
    q8, scale = per_token_cast_to_fp8(
        apply_rotary(q, cos, sin, interleaved=interleaved, dims=dims), use_ue8m0, hadamard=True
    )
    return q8, (weights * scale.squeeze(-1)).contiguous()


@torch.no_grad()
@without_autocast
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
    """Write FP8(H128 rope(LayerNorm(k))) of token t and its scale to the slot slots[t] = page * P + offset, in place.

    H128 is the Hadamard transform of 128 channels, and FP8 is the cast `per_token_cast_to_fp8`. LayerNorm, rope and
    Hadamard each round to k's dtype. Slot -1 skips the token. No other byte of the cache changes. Raises ValueError,
    before it writes, for a slot below -1 or beyond the cache. Arguments as in `dsa.write_indexer_keys`.
    Source: `Indexer.forward` of DeepSeek-V3.2's inference code.
    """
    normed = torch.nn.functional.layer_norm(k.float(), k.shape[1:], norm_weight, norm_bias, eps).to(k.dtype)
    rotated = apply_rotary(normed, cos, sin, interleaved=interleaved, dims=dims)
    k8, scale = per_token_cast_to_fp8(rotated, use_ue8m0, hadamard=True)
    write_indexer_cache(k8, scale.squeeze(-1), cache, slots)
