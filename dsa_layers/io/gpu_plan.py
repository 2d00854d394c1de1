"""What each of N GPUs would hold of a model, from its configuration alone."""

import math
from dataclasses import dataclass, replace

from dsa_layers.cache.cache import CacheSizes
from dsa_layers.config.model_config import ModelConfig
from dsa_layers.engine.fuse import fuse
from dsa_layers.engine.split import DoesNotDivide, copied, cuts_of, planned_layers, rank_part
from dsa_layers.io.directory import Checkpoint
from dsa_layers.io.loading import holds_fp4_experts, unfilled_model
from dsa_layers.io.memory import SHARE
from dsa_layers.models.precision import Precision
from dsa_layers.models.protocols import CheckpointModel

SEQUENCES = 64  # at a time, as `Generator` has them


@dataclass(frozen=True)
class GpuPlan:
    """Bytes on each of `gpus` GPUs, with a drafter's weights and cache. Every GPU has all of the caches, because
    latents and index keys belong to no head.

    weights  of weights, with the copies of the GPU's part of layers that it also has whole (`rank_part`)
    whole    of the weights on a single GPU
    slot     of a sequence's state slot in the caches
    page     of a page of `page_size` tokens in the caches
    """

    gpus: int
    weights: int
    whole: int
    slot: int
    page: int
    page_size: int

    def tokens(self, memory: int) -> int:
        """How many tokens the cache can hold on a GPU with so many bytes of memory; 0 if the weights alone do not
        fit."""
        sizes = CacheSizes(self.page, self.slot, self.page_size)
        return sizes.pages(int(SHARE * memory) - self.bytes(0), SEQUENCES) * self.page_size

    def bytes(self, cache_tokens: int) -> int:
        """Bytes in use on a GPU with caches for so many tokens. Every page may belong to another sequence, and the
        sequence that pads a batch has a page and a slot too."""
        pages = math.ceil(cache_tokens / self.page_size)
        return self.weights + (pages + 1) * self.page + (min(pages, SEQUENCES) + 1) * self.slot


def check_fits(found: GpuPlan, memory: int, cache_tokens: int) -> None:
    """Raise ValueError if a GPU of so much memory cannot hold its part and a cache for so many tokens."""
    if found.bytes(cache_tokens) > SHARE * memory:
        raise ValueError(
            f"gpus: each of {found.gpus} would hold {found.weights / 1e9:.1f} GB of weights, and with a cache for "
            f"{cache_tokens} tokens {found.bytes(cache_tokens) / 1e9:.1f} GB; accepted: at most {SHARE:.0%} of the "
            f"{memory / 1e9:.1f} GB that it has. `dsa plan` says which numbers of GPUs can"
        )


def precision_of(
    config: ModelConfig, files: Checkpoint | None = None, *, widen_experts: bool = False, **options: object
) -> Precision:
    """The precision that `load_model` chooses for a checkpoint. Experts have the files' dtype, or without files the
    dtype that config.json names. options: of `Precision.of`"""
    precision = Precision.of(config, **options)
    stored_in_fp4 = config.quantization is not None and config.quantization.expert_dtype == "fp4"
    if files is not None:
        stored_in_fp4 = holds_fp4_experts(files)
    return replace(precision, fp4_experts=precision.fp8_linear and stored_in_fp4 and not widen_experts)


def plan(config: ModelConfig, precision: Precision, gpus: int, *, drafter: bool = False) -> GpuPlan:
    """What each of `gpus` GPUs holds. Raises ValueErrors of `unfilled_model` for a drafter that does not exist, and
    DoesNotDivide, which names the number of GPUs, for a model that does not come apart into so many equal parts."""
    return _plan(fuse(unfilled_model(config, precision, drafter=drafter)), gpus)


def plans(
    config: ModelConfig, precision: Precision, most: int, *, drafter: bool = False
) -> dict[int, GpuPlan | DoesNotDivide]:
    """For every number of GPUs up to `most`: the plan, or why the model cannot be split over so many."""
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
    sizes = CacheSizes.of([model] if model.drafter is None else [model, model.drafter], model.page_size)
    return GpuPlan(gpus, part, sum(weights.values()), sizes.slot, sizes.page, model.page_size)
