"""What a prompt's index scores are accumulated in: one default for all models, and a choice for each."""

from typing import TypeVar

import torch
from torch import nn

from dsa.ops.indexer.fp8_mqa_logits import ACCUMULATORS
from dsa.runtime.checks import check_dtype
from dsa_layers.arguments import instance

# The default of every model: of `load_model`, of `dsa_layers.hf` and of layers by themselves. It says how Hopper
# kernels add up the FP8 scores of prompts; decoding, scores that are not FP8 and a CPU add in fp32.
#   torch.float16  1.4 to 1.7 times as fast as fp32 accumulators. Scores are off by about 5e-4 of their root mean
#                  square, and less than one of 1000 selected keys differs from those of torch.float32
#   torch.float32  the scores of DeepGEMM, up to the order of sums
SCORE_ACCUMULATORS = torch.float16

Module = TypeVar("Module", bound=nn.Module)


def set_score_accumulators(model: Module, accumulators: torch.dtype) -> Module:
    """Sets what the indexers of a model accumulate a prompt's scores in, and returns the model.

        model = set_score_accumulators(load_model(CHECKPOINT, device="cuda"), torch.float32)

    model         with a `LightningIndexer` or `CompressedIndexer`: of `load_model`, of transformers on `dsa_layers.hf`,
                  or one of the caller's own
    accumulators  torch.float32 or torch.float16 (`SCORE_ACCUMULATORS`)

    The next prompt has it. Kernels of torch.float32 are not among those that `dsa compile` makes in advance.
    Raises TypeError or ValueError that names the argument, also for a model without such an indexer.
    """
    instance("model", model, nn.Module, "a torch.nn.Module")
    check_dtype("accumulators", accumulators, ACCUMULATORS)
    indexers = [module for module in model.modules() if hasattr(module, "accumulators")]
    if not indexers:
        raise ValueError(
            f"model: must have a LightningIndexer or a CompressedIndexer, got {type(model).__name__} without one"
        )
    for indexer in indexers:
        indexer.accumulators = accumulators
    return model
