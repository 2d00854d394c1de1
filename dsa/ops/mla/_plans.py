"""Plans of decoding: the arguments with which callers of FlashMLA request and pass a plan, in the old and the new style
(see `get_mla_metadata`)."""

import dataclasses

import torch

from dsa.reference.mla.mla_metadata import FlashMLASchedMeta
from dsa.runtime.declare import (
    INT32,
    Arguments,
    Int,
    Tensor,
    check_flag,
    check_positive,
    check_same_device,
    check_tensor,
    shape_of,
)

MLA_METADATA = Arguments(
    cache_seqlens=Tensor("B", INT32), num_q_tokens_per_head_k=Int(), num_heads_k=Int(), most_keys=Int(least=0)
)

_FIELDS = ("have_initialized", "config", "tile_scheduler_metadata", "num_splits")  # FlashMLA's class has these too
_KEPT = "_dsa_sched_meta"  # the attribute of another library's object in which our FlashMLASchedMeta is stored
Plan = FlashMLASchedMeta | torch.Tensor | None


def own_plan(tile_scheduler_metadata: object) -> Plan:
    """Return the plan that the argument stands for. For an object of another library's class with the fields of
    FlashMLASchedMeta, this is our FlashMLASchedMeta, which is stored in an extra attribute of the object. Any other
    argument is returned unchanged.

    The object's other fields are neither read nor written, because FlashMLA stores a plan with other columns there.
    """
    meta = tile_scheduler_metadata
    if meta is None or isinstance(meta, (FlashMLASchedMeta, torch.Tensor, type)):
        return meta
    if not all(hasattr(meta, name) for name in _FIELDS):
        return meta
    own = getattr(meta, _KEPT, None)
    if not isinstance(own, FlashMLASchedMeta):
        own = FlashMLASchedMeta()
        try:
            setattr(meta, _KEPT, own)
        except (AttributeError, TypeError):
            raise TypeError(
                f"tile_scheduler_metadata: must be an object that takes attributes, in which a plan can be kept, got "
                f"{type(meta).__name__}, which takes none"
            ) from None
    return own


@dataclasses.dataclass(frozen=True)
class MetadataRequest:
    """The arguments of the old style that affect the plan."""

    cache_seqlens: torch.Tensor
    num_q_tokens_per_head_k: int
    num_heads_k: int
    topk: int | None


def metadata_request(
    cache_seqlens: torch.Tensor,
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> MetadataRequest:
    """Check the last three arguments, and return the request. num_heads_q and is_fp8_kvcache do not affect the plan."""
    if num_heads_q is not None:
        check_positive("num_heads_q", num_heads_q)
    check_flag("is_fp8_kvcache", is_fp8_kvcache)
    if topk is not None:
        check_positive("topk", topk)
    return MetadataRequest(cache_seqlens, num_q_tokens_per_head_k, num_heads_k, topk)


def check_plan(tile_scheduler_metadata: Plan, num_splits: torch.Tensor | None) -> None:
    """Check the types of the two arguments: a pair as `get_mla_metadata` returns it (two tensors, or a
    FlashMLASchedMeta and None), or two None. Raises TypeError or ValueError."""
    meta = tile_scheduler_metadata
    if meta is None:
        if num_splits is not None:
            got = type(num_splits).__name__
            raise ValueError(f"num_splits: must be None without tile_scheduler_metadata, got {got}")
    elif isinstance(meta, FlashMLASchedMeta):
        if num_splits is not None:
            raise ValueError(f"num_splits: must be None with a FlashMLASchedMeta, got {type(num_splits).__name__}")
    elif not isinstance(meta, torch.Tensor):
        raise TypeError(
            "tile_scheduler_metadata: must be a FlashMLASchedMeta, an object with its fields "
            f"({', '.join(_FIELDS)}), an int32 tensor [num_sm_parts, 8] or None, got {_named(meta)}"
        )
    elif not isinstance(num_splits, torch.Tensor):
        got = type(num_splits).__name__
        raise TypeError(f"num_splits: must be a torch.Tensor, got {got} (tile_scheduler_metadata is one)")


def _named(meta: object) -> str:
    """Return the type of a wrong plan for a message. The class FlashMLASchedMeta itself is a likely mistake."""
    return f"the class {meta.__name__}" if isinstance(meta, type) else type(meta).__name__


def check_plan_tensors(meta: Plan, num_splits: torch.Tensor | None, q: torch.Tensor) -> None:
    """Check that a plan of the old style has as many sequences as q, for decoding that does not read the plan."""
    if isinstance(meta, torch.Tensor) and (shape := shape_of(q)):
        check_tensor("tile_scheduler_metadata", meta, INT32, ("num_sm_parts", 8))
        check_tensor("num_splits", num_splits, INT32, (shape[0] + 1,), "q and tile_scheduler_metadata")
        check_same_device(("q", q), tile_scheduler_metadata=meta, num_splits=num_splits)


def bind_plan(meta: Plan, config: dict[str, object]) -> None:
    """Store `config`, the shapes of a call, at the plan's first use. Raises ValueError for a later call with other
    shapes."""
    if not isinstance(meta, FlashMLASchedMeta):
        return
    if meta.have_initialized and meta.config != config:
        raise ValueError(
            f"tile_scheduler_metadata: was first used with {meta.config}, got {config}; get a new one for other shapes"
        )
    meta.have_initialized, meta.config = True, config
