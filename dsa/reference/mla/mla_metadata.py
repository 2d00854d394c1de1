"""Plans of MLA decoding: how FlashMLA's callers ask for one, in its old and in its new calling style."""

import dataclasses

import torch

from dsa.reference.checks import INT32, check_flag, check_memory, check_positive, check_same_device, check_tensor

_META_SIZE = 8
_TO_THE_END = 2**30


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
    A row of the first is one part of the work: its first sequence, the block of 64 keys where it begins there, its
    last sequence (inclusive), the block where it stops there (2^30: the end), how many splits of its first sequence
    are before it; then, of row i, the i-th sequence that is split, or -1; two unused numbers. num_splits counts the
    splits of the split sequences before each sequence. The reference needs no plan: its own has one part and no splits.

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
    if num_heads_q is not None:
        check_positive("num_heads_q", num_heads_q)
    check_flag("is_fp8_kvcache", is_fp8_kvcache)
    check_positive("num_q_tokens_per_head_k", num_q_tokens_per_head_k)
    check_positive("num_heads_k", num_heads_k)
    if topk is not None:
        check_positive("topk", topk)
    return MetadataRequest(cache_seqlens, num_q_tokens_per_head_k, num_heads_k, topk)


def plan_one_part(request: MetadataRequest) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's plan: one part, no sequence split."""
    cache_seqlens = request.cache_seqlens
    check_memory("cache_seqlens", cache_seqlens)
    batch = cache_seqlens.shape[0]
    part = [0, 0, batch - 1, _TO_THE_END, 0, -1, 0, 0]
    metadata = torch.tensor([part], dtype=torch.int32, device=cache_seqlens.device)
    return metadata, torch.zeros(batch + 1, dtype=torch.int32, device=cache_seqlens.device)


def check_plan(
    tile_scheduler_metadata: FlashMLASchedMeta | torch.Tensor | None,
    num_splits: torch.Tensor | None,
    q: torch.Tensor,
    config: dict,
) -> None:
    """The plan is one that `get_mla_metadata` gives, and an object that saw a call before saw the same shapes."""
    if tile_scheduler_metadata is None:
        if num_splits is not None:
            raise ValueError(
                f"num_splits: must be None without tile_scheduler_metadata, got {type(num_splits).__name__}"
            )
        return
    if isinstance(tile_scheduler_metadata, torch.Tensor):
        check_tensor("tile_scheduler_metadata", tile_scheduler_metadata, INT32, ("num_sm_parts", _META_SIZE))
        check_tensor("num_splits", num_splits, INT32, (q.shape[0] + 1,), "q and tile_scheduler_metadata")
        check_same_device(("q", q), tile_scheduler_metadata=tile_scheduler_metadata, num_splits=num_splits)
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


def remember_config(tile_scheduler_metadata: FlashMLASchedMeta | torch.Tensor | None, config: dict) -> None:
    """A call with these shapes is being made with the plan."""
    if isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        tile_scheduler_metadata.have_initialized, tile_scheduler_metadata.config = True, config
