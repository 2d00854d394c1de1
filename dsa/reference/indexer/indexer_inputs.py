"""What the lightning indexer does to its projections before it scores: norm, rope, Hadamard, FP8."""

import torch

from dsa.ops.cache._specs import BYTES, SLOTS, check_index_cache
from dsa.reference.autocast import without_autocast
from dsa.reference.cache.indexer_cache import write_indexer_cache
from dsa.reference.elementwise.rotary import DIMS, apply_rotary, check_rotated
from dsa.reference.gemm.fp8_cast import per_token_cast_to_fp8
from dsa.runtime.arguments import CONTIGUOUS, F32, INNER, PAGES, ROWS, Arguments, Choice, Flag, Number, Tensor
from dsa.runtime.checks import FLOATS, check_memory

DIM = 128


def _check_queries(q: torch.Tensor, cos: torch.Tensor) -> None:
    check_rotated("q", q, cos)


def _check_keys(k: torch.Tensor, cos: torch.Tensor) -> None:
    check_rotated("k", k, cos)


_ROPE = {"interleaved": Flag(), "dims": Choice(DIMS), "use_ue8m0": Flag()}
QUANTIZE_INDEXER_QUERIES = Arguments(
    rule=_check_queries,
    q=Tensor("T H 128", FLOATS, layout=ROWS),
    weights=Tensor("T H", F32, layout=INNER),
    cos=Tensor("T R/2", F32),
    sin=Tensor("T R/2", F32),
    **_ROPE,
)
WRITE_INDEXER_KEYS = Arguments(
    rule=_check_keys,
    first=("cache",),
    k=Tensor("T 128", FLOATS, layout=ROWS),
    norm_weight=Tensor("128", F32, layout=ROWS),
    norm_bias=Tensor("128", F32, layout=ROWS),
    cos=Tensor("T R/2", F32),
    sin=Tensor("T R/2", F32),
    cache=Tensor("pages P 1 132", BYTES, rule=check_index_cache, layout=PAGES, written=True),
    slots=Tensor("T", SLOTS, layout=CONTIGUOUS),
    eps=Number(least=0),
    **_ROPE,
)


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
    """q8, s = FP8(H128 rope(q)) with one scale s per token and head, which goes into the head's weight: w8 = weights s.

    Rope and Hadamard each round to q's dtype. Arguments as of `dsa.quantize_indexer_queries`.
    Source: `Indexer.forward` of DeepSeek-V3.2's inference code.
    """
    QUANTIZE_INDEXER_QUERIES.check(q, weights, cos, sin, interleaved, dims, use_ue8m0)
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

    LayerNorm, rope and Hadamard each round to k's dtype. Every other byte of the cache stays as it is. Raises
    ValueError for slots below -1 or beyond the cache, too. Arguments as of `dsa.write_indexer_keys`.
    Source: `Indexer.forward` of DeepSeek-V3.2's inference code.
    """
    WRITE_INDEXER_KEYS.check(k, norm_weight, norm_bias, cos, sin, cache, slots, eps, interleaved, dims, use_ue8m0)
    check_memory("cache", cache)
    normed = torch.nn.functional.layer_norm(k.float(), (DIM,), norm_weight, norm_bias, eps).to(k.dtype)
    turned = apply_rotary(normed, cos, sin, interleaved=interleaved, dims=dims)
    k8, scale = per_token_cast_to_fp8(turned, use_ue8m0, hadamard=True)
    write_indexer_cache(k8, scale.squeeze(-1), cache, slots)
