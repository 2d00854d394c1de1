"""Replace classes of transformers' layers by classes of this package."""

from types import MethodType
from typing import TYPE_CHECKING

from dsa_layers.arguments import flag, instance

if TYPE_CHECKING:
    import torch

VERSION = "5.24"  # of transformers, with which the tests pass


def accelerate(model: "torch.nn.Module", *, fp8_indexer: bool = False) -> "torch.nn.Module":
    """Put a model of transformers on dsa's ops, in place, and return it. The classes of its attention layers, indexers,
    compressors and norms change; parameters, hooks and adapters stay.

    fp8_indexer  False: index queries and keys have the model's dtype, as in transformers. PyTorch computes the scores.
                 True: index queries and keys go through the Hadamard transform and e4m3, as in the published models.
                 This has kernels on Hopper for index_head_dim = 128, and an index key takes 132 bytes in the cache.
                 Scores of prompts have the accumulators of `load_model` (`dsa_layers.layers.indexer`)

    A second call changes fp8_indexer. Raises ValueError for a model without layers of these families, ImportError
    without transformers, and RuntimeError for a version of transformers that is not tested.
    """
    from torch import nn

    instance("model", model, nn.Module, "a torch.nn.Module")
    flag("fp8_indexer", fp8_indexer)
    _check_version()
    from dsa_layers.hf import deepseek_v4, parts, sparse_mla

    classes = sparse_mla.CLASSES | deepseek_v4.CLASSES
    known = {*classes, *classes.values()}
    found = [module for module in model.modules() if type(module) in known]
    if not found:
        raise ValueError(
            "model: must have attention layers of DeepseekV32, GlmMoeDsa or DeepseekV4 as transformers makes them, "
            f"got {type(model).__name__}"
        )
    for module in found:
        module.__class__ = classes.get(type(module), type(module))
        if "_old_forward" in vars(module):  # the `accelerate` library calls it instead of the class's forward
            module._old_forward = MethodType(type(module).forward, module)
        if isinstance(module, parts.AttentionInPlace):
            module.config._attn_implementation = parts.IMPLEMENTATION
        if hasattr(module, "quantize"):
            module.quantize = fp8_indexer
    return model


def _check_version() -> None:
    try:
        from transformers import __version__ as version
    except ImportError:
        raise ImportError("transformers: is not installed; pip install 'dsa-kernels[transformers]'") from None
    if not version.startswith(f"{VERSION}."):
        raise RuntimeError(
            f"transformers: version {version} was not tested with dsa, which left its models as they are; accepted: "
            f"{VERSION}"
        )
