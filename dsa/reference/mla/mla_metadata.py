"""Plans of MLA decoding, for both calling styles of FlashMLA: an object, or in older versions two tensors."""

import dataclasses

import torch

_TO_THE_END = 2**30


@dataclasses.dataclass
class FlashMLASchedMeta:
    """The plan that `flash_mla_with_kvcache` stores on its first call. Later calls must have the same `config`.

    config   what the plan is bound to: the shapes of q and of a page of k_cache, `causal`, and in sparse decoding the
             page size and the number of indices per query of each cache
    capture  the ID of the stream capture during which the plan was made: each replay of that CUDA graph computes the
             plan again. None: the plan was not made during a capture
    """

    have_initialized: bool = False
    config: dict | None = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None
    capture: int | None = None


def get_mla_metadata(*args, **kwargs) -> tuple[FlashMLASchedMeta, None] | tuple[torch.Tensor, torch.Tensor]:
    """A plan for `flash_mla_with_kvcache`, to be passed as its `tile_scheduler_metadata` and `num_splits`.

    Arguments and results as in `dsa.get_mla_metadata`. The reference needs no plan. In the new style (no arguments) the
    object is empty; in the old style (with arguments) the plan has one part and splits no sequence.
    Source: FlashMLA's function of this name.
    """
    if not args and not kwargs:
        return FlashMLASchedMeta(), None
    return plan_one_part(args[0] if args else kwargs["cache_seqlens"])


def plan_one_part(cache_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a plan with one part that splits no sequence.

    Its numbers are filled in on the device, because a copy from the host would make the host wait for the device.
    """
    batch = cache_seqlens.shape[0]
    metadata = torch.zeros(1, 8, dtype=torch.int32, device=cache_seqlens.device)
    for column, number in ((2, batch - 1), (3, _TO_THE_END), (5, -1)):
        metadata[:, column].fill_(number)
    return metadata, torch.zeros(batch + 1, dtype=torch.int32, device=cache_seqlens.device)
