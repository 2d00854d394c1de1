"""Run transformers' DeepseekV32, GlmMoeDsa and DeepseekV4 models with dsa's ops.

    from dsa_layers.hf import accelerate
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("zai-org/GLM-5.2", device_map="auto")
    accelerate(model, fp8_indexer=True)

Parameters keep their names, so checkpoints, optimisers and adapters work as before. Attention runs the code of
`dsa_layers.layers` in passes with gradients or within an `IndexerStage`, and the code of `dsa_layers.engine` in other
passes. Both use the lengths of sequences instead of an attention mask.
"""

from types import MethodType

from torch import nn

from dsa.runtime.checks import check_flag, check_instance

__all__ = ["accelerate"]

VERSION = "5.24"  # the tested version of transformers


def accelerate(model: nn.Module, *, fp8_indexer: bool = False) -> nn.Module:
    """Make a model of transformers use dsa's ops, in place, and return the model. This function replaces the classes of
    the model's attention layers, indexers, compressors and norms. Parameters, hooks and adapters do not change.

    fp8_indexer  False: index queries and keys have the model's dtype, as in transformers, and PyTorch computes the
                 scores. True: index queries and keys, which must have 128 channels, are Hadamard-transformed and
                 quantised to e4m3, as in the published models. A key takes 132 bytes in the cache. On Hopper, scores in
                 prefill are accumulated in `dsa_layers.layers.key_selection.SCORE_ACCUMULATORS`, as with `load_model`

    A second call may change fp8_indexer. Raise ValueError if the model has no layers of DeepseekV32, GlmMoeDsa or
    DeepseekV4, ImportError if transformers is not installed, and RuntimeError if its version is not tested (VERSION).
    """
    check_instance("model", model, nn.Module, "a torch.nn.Module")
    check_flag("fp8_indexer", fp8_indexer)
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
        if "_old_forward" in vars(module):  # the `accelerate` library calls this attribute instead of forward
            module._old_forward = MethodType(type(module).forward, module)
        if isinstance(module, parts.AttentionInPlace):
            module.config._attn_implementation = parts.IMPLEMENTATION
        if hasattr(module, "quantize"):
            module.quantize = fp8_indexer
    return model


def _check_version() -> None:
    from transformers import __version__ as version  # the extra `transformers` installs it

    if not version.startswith(f"{VERSION}."):
        raise RuntimeError(
            f"transformers: version {version} was not tested with dsa, which left its models as they are; accepted: "
            f"{VERSION}"
        )
