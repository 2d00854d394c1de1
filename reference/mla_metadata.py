"""Plans of MLA decoding: how FlashMLA's callers ask for one, in its old and in its new calling style."""

import dataclasses

import torch

from .checks import INT32, check_positive, check_tensor

_BLOCK = 64
_META_SIZE = 8


@dataclasses.dataclass
class FlashMLASchedMeta:
    """What `flash_mla_with_kvcache` remembers of its first call. Later calls must have the same `config`."""

    have_initialized: bool = False
    config: dict | None = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


def get_mla_metadata(*args, **kwargs) -> tuple[FlashMLASchedMeta, None] | tuple[torch.Tensor, torch.Tensor]:
    """A plan for `flash_mla_with_kvcache`, to be passed as its `tile_scheduler_metadata` and `num_splits`.

    New style, no arguments: (FlashMLASchedMeta(), None). The object takes up the shapes of the first call that gets
    it.

    Old style, (cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q=None, is_fp8_kvcache=False, topk=None)
    by position or by name: (tile_scheduler_metadata [num_sm_parts, 8] int32, num_splits [B + 1] int32).
      cache_seqlens            [B] int32, cached keys per sequence
      num_q_tokens_per_head_k  s_q * h_q / h_k
      topk                     None, or the keys that every query selects
    A row of the first is one SM part: first sequence, its first block of 64 keys, last sequence (inclusive), the end
    of its blocks, the split that the part starts with, and three unused numbers. num_splits counts the splits of all
    earlier sequences. The reference needs no plan, so its own has one part and one split per sequence.

    Raises TypeError or ValueError for other types, dtypes and shapes. Source: FlashMLA's function of this name.
    """
    if not args and not kwargs:
        return FlashMLASchedMeta(), None
    return plan_one_part(check_metadata(*args, **kwargs))


@dataclasses.dataclass(frozen=True)
class MetadataRequest:
    """The arguments of `get_mla_metadata` in the old style."""

    cache_seqlens: torch.Tensor
    num_q_tokens_per_head_k: int
    num_heads_k: int
    topk: int | None


def check_metadata(
    cache_seqlens: torch.Tensor,
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> MetadataRequest:
    """The request, or the error that its arguments call for. num_heads_q and is_fp8_kvcache change nothing."""
    check_tensor("cache_seqlens", cache_seqlens, INT32, ("B",))
    check_positive("num_q_tokens_per_head_k", num_q_tokens_per_head_k)
    check_positive("num_heads_k", num_heads_k)
    if topk is not None:
        check_positive("topk", topk)
    return MetadataRequest(cache_seqlens, num_q_tokens_per_head_k, num_heads_k, topk)


def plan_one_part(request: MetadataRequest) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's plan: one part, no sequence split."""
    cache_seqlens, topk = request.cache_seqlens, request.topk
    batch = cache_seqlens.shape[0]
    metadata = torch.zeros(1, _META_SIZE, dtype=torch.int32, device=cache_seqlens.device)
    if batch:
        metadata[0, 2] = batch - 1
        last = cache_seqlens[-1] if topk is None else torch.full_like(cache_seqlens[-1], topk)
        metadata[0, 3] = (last + _BLOCK - 1) // _BLOCK
    return metadata, torch.arange(batch + 1, dtype=torch.int32, device=cache_seqlens.device)


def check_plan(
    tile_scheduler_metadata: FlashMLASchedMeta | torch.Tensor | None,
    num_splits: torch.Tensor | None,
    batch: int,
    config: dict,
) -> None:
    """The plan is one that `get_mla_metadata` gives, and a plan that saw a call before saw the same shapes."""
    if tile_scheduler_metadata is None:
        return
    if isinstance(tile_scheduler_metadata, torch.Tensor):
        check_tensor("tile_scheduler_metadata", tile_scheduler_metadata, INT32, ("num_sm_parts", _META_SIZE))
        check_tensor("num_splits", num_splits, INT32, (batch + 1,))
        return
    if not isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        raise TypeError(
            "tile_scheduler_metadata: must be a FlashMLASchedMeta, an int32 tensor [num_sm_parts, 8] or None, "
            f"got {type(tile_scheduler_metadata).__name__}"
        )
    if num_splits is not None:
        raise ValueError(f"num_splits: must be None with a FlashMLASchedMeta, got {type(num_splits).__name__}")
    if tile_scheduler_metadata.have_initialized and tile_scheduler_metadata.config != config:
        raise ValueError(
            f"tile_scheduler_metadata: was first used with {tile_scheduler_metadata.config}, "
            f"got {config}; get a new one for other shapes"
        )
    tile_scheduler_metadata.have_initialized, tile_scheduler_metadata.config = True, config
