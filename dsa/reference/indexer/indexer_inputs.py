"""What the lightning indexer does to its projections before it scores: norm, rope, Hadamard, FP8."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.cache.indexer_cache import SLOTS, check_cache, write_indexer_cache
from dsa.reference.checks import (
    FLOATS,
    check_flag,
    check_memory,
    check_number,
    check_same_device,
    check_tensor,
    check_writable,
)
from dsa.reference.elementwise.rotary import apply_rotary, check_rotary
from dsa.reference.gemm.fp8_cast import per_token_cast_to_fp8

DIM = 128


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
    """q8, s = FP8(H128 rope(q)) with one scale per head; the scale folds into the head's weight: w8 = weights * s.

    q        [T, H, 128] bf16, fp16 or fp32
    weights  [T, H] fp32
    others   as `write_indexer_keys`

    Returns q8 [T, H, 128] e4m3 and w8 [T, H] fp32, so that sum_h w8 relu(q8 . k) is the score of k.
    Rope and Hadamard each round to q's dtype. Raises TypeError or ValueError for other types, dtypes and shapes.
    Source: `Indexer.forward` of DeepSeek-V3.2's inference code.
    """
    check_queries(q, weights, cos, sin, interleaved, dims, use_ue8m0)
    check_memory("q", q)
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
    """Writes FP8(H128 rope(LayerNorm(k))) and its scale into token t's slot slots[t] = page * P + offset, in place.

    k            [T, 128] bf16, fp16 or fp32: the key projection
    norm_weight  [128] fp32, and norm_bias: of the LayerNorm over the 128 channels
    cos, sin     [T, R / 2] fp32, R at most 128: of the tokens' positions
    cache        [pages, P, 1, 132] uint8, laid out as `indexer_cache` says
    slots        [T] int32 or int64; -1 skips the token. Two tokens must not share a slot
    eps          added to the variance: a finite number, at least 0
    interleaved  rope turns the pairs (2i, 2i + 1); False: (i, i + R / 2)
    dims         rope turns the "first" or the "last" R channels
    use_ue8m0    the scale is a power of two

    LayerNorm, rope and Hadamard each round to k's dtype. Every other byte of the cache stays as it is. Raises TypeError
    or ValueError for other types, dtypes and shapes, and for slots below -1 or beyond the cache.
    Source: `Indexer.forward` of DeepSeek-V3.2's inference code.
    """
    check_keys(k, norm_weight, norm_bias, cos, sin, cache, slots, eps, interleaved, dims, use_ue8m0)
    check_memory("cache", cache)
    normed = torch.nn.functional.layer_norm(k.float(), (DIM,), norm_weight, norm_bias, eps).to(k.dtype)
    turned = apply_rotary(normed, cos, sin, interleaved=interleaved, dims=dims)
    k8, scale = per_token_cast_to_fp8(turned, use_ue8m0, hadamard=True)
    write_indexer_cache(k8, scale.squeeze(-1), cache, slots)


def check_queries(
    q: torch.Tensor,
    weights: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    dims: str,
    use_ue8m0: bool,
) -> None:
    """The checks of `quantize_indexer_queries`."""
    check_tensor("q", q, FLOATS, ("T", "H", DIM))
    check_tensor("weights", weights, (torch.float32,), tuple(q.shape[:2]), "q")
    check_rotary("q", q, cos, sin, interleaved, dims)
    check_flag("use_ue8m0", use_ue8m0)
    check_same_device(("q", q), weights=weights)


def check_keys(
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
    """The checks of `write_indexer_keys`, but for the slots' values."""
    check_tensor("k", k, FLOATS, ("T", DIM))
    check_tensor("norm_weight", norm_weight, (torch.float32,), (DIM,))
    check_tensor("norm_bias", norm_bias, (torch.float32,), (DIM,))
    check_number("eps", eps, 0)
    check_flag("use_ue8m0", use_ue8m0)
    check_cache("cache", cache, DIM)
    check_writable("cache", cache)
    check_tensor("slots", slots, SLOTS, (k.shape[0],), "k")
    check_same_device(("cache", cache), k=k, norm_weight=norm_weight, norm_bias=norm_bias, slots=slots)
    check_rotary("k", k, cos, sin, interleaved, dims)
