"""FlashMLA's functions with their names and signatures. They call `dsa.flash_mla_with_kvcache` and
`dsa.flash_mla_sparse_fwd`, whose docstrings say what they compute.

`import dsa.compat.flash_mla as flash_mla` replaces `import flash_mla` on Hopper. The replaced package can be FlashMLA's
own, vLLM's copy of it, or sgl-flash-mla 1.0. As in these packages,
- `get_mla_metadata` returns an empty FlashMLASchedMeta and None, whatever arguments callers of any version pass;
- the log-sum-exp of sparse decoding, [B, h_q, s_q], is a transposed view of a [B, s_q, h_q] tensor.

The packages agree on the order of arguments up to `extra_topk_length` (decoding) and `topk_length` (prefill). Later
arguments are keyword-only here. `use_legacy` tells sgl-flash-mla which of two builds to run; here it has no effect.
Features that only one of the two builds has are refused: caches of 528 or 288 bytes per key (`kv_format`), and dense
decoding in FP8 (`descale_q`, `descale_k`). Beyond FlashMLA, these functions accept everything that the ops accept. In
place of this module's FlashMLASchedMeta they accept an object of FlashMLA's own class.

Errors are those of the ops. Sources: FlashMLA's flash_mla/flash_mla_interface.py and its tests.
"""

import math
from typing import NoReturn

import torch

from dsa.ops.mla import flash_mla_sparse_fwd as prefill
from dsa.ops.mla import flash_mla_with_kvcache as decoding
from dsa.ops.mla.flash_mla_with_kvcache import FlashMLASchedMeta
from dsa.reference.cache.kv_cache import BYTE_DTYPES
from dsa.runtime.checks import check_flag

__all__ = [
    "FlashMLASchedMeta",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_decoding_metadata",
    "get_mla_metadata",
]

_LOG2_E = math.log2(math.e)


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"{__name__} has no {name!r}. It has FlashMLA's {', '.join(__all__)}")


def get_mla_metadata(*args: object, **kwargs: object) -> tuple[FlashMLASchedMeta, None]:
    """Return (FlashMLASchedMeta(), None), whatever the arguments. Code in FlashMLA's older style passes both results on
    to `flash_mla_with_kvcache`."""
    return FlashMLASchedMeta(), None


def get_mla_decoding_metadata(
    seqlens_k: torch.Tensor,
    num_q_tokens_per_head_k: int,
    h_k: int,
    h_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    use_legacy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the plan of `dsa.get_mla_metadata` in the older style, as two tensors. The host does not wait for the GPU.

    Pass the tensors to `flash_mla_with_kvcache` as they are, or in the fields of this module's FlashMLASchedMeta. If
    they are in the fields of another class's object, such as FlashMLA's, the plan is not read.
    """
    check_flag("use_legacy", use_legacy)
    return decoding.get_mla_metadata(seqlens_k, num_q_tokens_per_head_k, h_k, h_q, is_fp8_kvcache, topk)


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`dsa.flash_mla_with_kvcache`. is_fp8_kvcache: None means True if k_cache is uint8, int8 or float8_e4m3fn, else
    False."""
    check_flag("use_legacy", use_legacy)
    for name, value in (("kv_format", kv_format), ("descale_q", descale_q), ("descale_k", descale_k)):
        if value is not None:
            raise ValueError(f"{name}: must be None, got {value if isinstance(value, str) else type(value).__name__}")
    if is_fp8_kvcache is None:
        is_fp8_kvcache = isinstance(k_cache, torch.Tensor) and k_cache.dtype in BYTE_DTYPES
    return decoding.flash_mla_with_kvcache(
        *(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits),
        *(softmax_scale, causal, is_fp8_kvcache, indices, attn_sink, extra_k_cache, extra_indices_in_kvcache),
        *(topk_length, extra_topk_length, out, enable_batch_invariant),
    )


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    return_log2_lse: bool | None = None,
    indexer_topk: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """`dsa.flash_mla_sparse_fwd`.

    indexer_topk     must be 0; FlashMLA's newest version supports other values on Blackwell
    return_log2_lse  None: max_logits and lse use the natural log; True: both are divided by ln 2, as in sgl-flash-mla's
                     older build; False: None is returned in place of both
    """
    check_flag("use_legacy", use_legacy)
    if return_log2_lse is not None:
        check_flag("return_log2_lse", return_log2_lse)
    if indexer_topk != 0:
        raise ValueError(f"indexer_topk: must be 0, got {indexer_topk!r}")
    options = attn_sink, topk_length, out, enable_batch_invariant
    out, *statistics = prefill.flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v, *options)
    if return_log2_lse is False:
        return out, None, None
    return out, *((x * _LOG2_E for x in statistics) if return_log2_lse else statistics)
