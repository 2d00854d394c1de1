"""What each of N GPUs would hold of a model, from its configuration alone."""

import math
from dataclasses import dataclass, replace

import torch
from torch import nn

from dsa_layers.checkpoint import Checkpoint
from dsa_layers.checkpoint.loading import holds_fp4_experts
from dsa_layers.families.model import CheckpointModel, ModelConfig
from dsa_layers.families.precision import Precision
from dsa_layers.families.registry import family
from dsa_layers.families.unfilled import unfilled
from dsa_layers.parallel.cuts import DoesNotDivide, cuts_of

# Of a GPU's memory what weights and caches may have: activations, scores, kernels, CUDA and NCCL take the rest.
SHARE = 0.9
STATE_SLOTS = 64  # sequences at a time, as `Generator` has them


@dataclass(frozen=True)
class GpuPlan:
    """weights: bytes on a GPU, of `whole` on a single one. cache: bytes beside pages; page: of a page of `page_size`
    tokens. Every GPU has all of the caches: latents and index keys belong to no head."""

    gpus: int
    weights: int
    whole: int
    cache: int
    page: int
    page_size: int

    def tokens(self, memory: int) -> int:
        """How many tokens the cache can hold beside the weights, where a GPU has so much memory; 0 where these alone do
        not fit."""
        left = int(SHARE * memory) - self.weights - self.cache
        return max(left // self.page, 0) * self.page_size

    def bytes(self, cache_tokens: int) -> int:
        """On a GPU, with a cache for so many tokens."""
        return self.weights + self.cache + self.page * math.ceil(cache_tokens / self.page_size)


def check_fits(found: GpuPlan, memory: int, cache_tokens: int) -> None:
    """ValueError where a GPU of so much memory cannot hold its part and a cache for so many tokens."""
    if found.bytes(cache_tokens) > SHARE * memory:
        raise ValueError(
            f"gpus: each of {found.gpus} would hold {found.weights / 1e9:.1f} GB of weights, and with a cache for "
            f"{cache_tokens} tokens {found.bytes(cache_tokens) / 1e9:.1f} GB; accepted: at most {SHARE:.0%} of the "
            f"{memory / 1e9:.1f} GB that it has. `dsa plan` says which numbers of GPUs can"
        )


def precision_of(
    config: ModelConfig, files: Checkpoint | None = None, *, widen_experts: bool = False, **options: object
) -> Precision:
    """As `load_model` chooses it for a checkpoint: experts are stored as its files have them, or where these are not
    here as config.json says. options: of `Precision.of`."""
    precision = Precision.of(config, **options)
    stored_in_fp4 = config.quantization is not None and config.quantization.expert_dtype == "fp4"
    if files is not None:
        stored_in_fp4 = holds_fp4_experts(files)
    return replace(precision, fp4_experts=precision.fp8_linear and stored_in_fp4 and not widen_experts)


def plan(config: ModelConfig, precision: Precision, gpus: int) -> GpuPlan:
    """DoesNotDivide, which names the number of GPUs, for a model that does not come apart into so many equal parts."""
    return _plan(_model(config, precision), gpus)


def plans(config: ModelConfig, precision: Precision, most: int) -> list[GpuPlan]:
    """Of every number of GPUs up to `most` that the model can be split over."""
    model, found = _model(config, precision), []
    for gpus in range(1, most + 1):
        try:
            found.append(_plan(model, gpus))
        except DoesNotDivide:
            continue
    return found


def _model(config: ModelConfig, precision: Precision) -> CheckpointModel:
    with unfilled():
        return family(config.model_type).model(config, precision)


def _plan(model: CheckpointModel, gpus: int) -> GpuPlan:
    cuts = cuts_of(model, gpus, blocks=model.config.quantization is not None)
    weights = {name: tensor.nbytes for name, tensor in model.state_dict().items()}
    part = sum(size // gpus if name in cuts else size for name, size in weights.items())
    size = model.page_size
    one, two = (_cache_bytes(model, pages) for pages in (1, 2))
    return GpuPlan(gpus, part, sum(weights.values()), 2 * one - two, two - one, size)


def _cache_bytes(model: nn.Module, pages: int) -> int:
    return model.make_cache(pages, model.page_size, torch.device("meta"), state_slots=STATE_SLOTS).nbytes
