"""Plans of GPU memory: the bytes of a model's weights and caches on each of several GPUs."""

import math
from dataclasses import dataclass

import torch

from dsa_layers.cache.kv_cache import CacheSizes
from dsa_layers.config.model_config import ModelConfig
from dsa_layers.engine.fuse import fuse
from dsa_layers.engine.split import DoesNotDivide, copied, counts_of_rank, cuts_of, planned_layers, rank_part
from dsa_layers.io.loading import unfilled_model
from dsa_layers.models.precision import Precision
from dsa_layers.models.protocols import CheckpointModel

SEQUENCES = 64  # concurrent sequences, the default of `EngineOptions.max_sequences`


@dataclass(frozen=True)
class GpuPlan:
    """The bytes of a model, and of its drafter if it has one, on each of `gpus` GPUs. Every GPU stores whole caches,
    because all heads share the latents and index keys, except the states of Kimi delta attention, which are split by
    heads.

    weights  bytes of weights on one of the GPUs. Replicated layers (`planned_layers` in engine/split.py) count in full,
             plus the FP8 weights that `rank_part` copies from them
    whole    bytes of weights if a single GPU holds the model
    slot     bytes of one sequence's state slot on one GPU, summed over the caches of model and drafter
    page     bytes of one page of `page_size` tokens, summed over these caches
    """

    gpus: int
    weights: int
    whole: int
    slot: int
    page: int
    page_size: int

    def tokens(self, memory: int) -> int:
        """Return the number of tokens that the caches can hold if weights and caches take at most SHARE (below) of a
        GPU's `memory` bytes. Return 0 if there is no room for a page."""
        sizes = CacheSizes(self.page, self.slot, self.page_size)
        return sizes.pages(int(SHARE * memory) - self.bytes(0), SEQUENCES) * self.page_size

    def bytes(self, cache_tokens: int) -> int:
        """Return the bytes of weights and caches for `cache_tokens` tokens on a GPU. There is a state slot per page, up
        to SEQUENCES, and an additional page and slot for padding."""
        pages = math.ceil(cache_tokens / self.page_size)
        return self.weights + (pages + 1) * self.page + (min(pages, SEQUENCES) + 1) * self.slot


def check_fits(found: GpuPlan, memory: int, cache_tokens: int) -> None:
    """Raise ValueError if the weights and a cache for `cache_tokens` tokens need more than SHARE (below) of a GPU's
    `memory` bytes."""
    if found.bytes(cache_tokens) > SHARE * memory:
        raise ValueError(
            f"gpus: each of {found.gpus} would hold {found.weights / 1e9:.1f} GB of weights, and with a cache for "
            f"{cache_tokens} tokens {found.bytes(cache_tokens) / 1e9:.1f} GB; accepted: at most {SHARE:.0%} of the "
            f"{memory / 1e9:.1f} GB that it has. `dsa plan` says which numbers of GPUs can"
        )


def plan(config: ModelConfig, precision: Precision, gpus: int, *, drafter: bool = False) -> GpuPlan:
    """Return the plan for `gpus` GPUs. Raises the errors of `unfilled_model`, and DoesNotDivide if the model cannot be
    split into `gpus` equal parts."""
    return _plan(fuse(unfilled_model(config, precision, drafter=drafter)), gpus)


def plans(
    config: ModelConfig, precision: Precision, most: int, *, drafter: bool = False
) -> dict[int, GpuPlan | DoesNotDivide]:
    """Return {number of GPUs: plan} for 1 to `most` GPUs. The value is a DoesNotDivide error if that number of GPUs
    cannot share the model."""
    model, found = fuse(unfilled_model(config, precision, drafter=drafter)), {}
    for gpus in range(1, most + 1):
        try:
            found[gpus] = _plan(model, gpus)
        except DoesNotDivide as error:
            found[gpus] = error
    return found


def _plan(model: CheckpointModel, gpus: int) -> GpuPlan:
    cuts = cuts_of(model, gpus, blocks=model.config.quantization is not None)
    weights = {name: tensor.nbytes for name, tensor in model.state_dict().items()}
    part = sum(size // gpus if name in cuts else size for name, size in weights.items())
    if gpus > 1:
        whole = [layer for _, layer, plan in planned_layers(model, gpus) if plan.replicated]
        part += sum(x.nbytes for layer in whole for x in copied(rank_part(layer, 0, gpus)))
    with counts_of_rank(model, gpus):
        sizes = CacheSizes.of([model] if model.drafter is None else [model, model.drafter], model.page_size)
    return GpuPlan(gpus, part, sum(weights.values()), sizes.slot, sizes.page, model.page_size)


# Fraction of a GPU's memory for weights and caches. The remainder is for activations, scores, dequantised copies of
# weights, kernels, CUDA and NCCL.
SHARE = 0.9


def room_for_caches(device: torch.device) -> int:
    """Return the number of bytes that caches may still allocate on a GPU: the free memory minus (1 - SHARE) of the
    total memory, or 0 if this is negative."""
    free, total = torch.cuda.mem_get_info(device)
    # Memory that torch's caching allocator holds but no tensor uses counts as free.
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(free + unused - int((1 - SHARE) * total), 0)
