"""Puts this package's classes in the places of transformers'."""

import importlib
import importlib.util
from types import MethodType, ModuleType
from typing import TYPE_CHECKING

from dsa_layers.arguments import flag, instance

if TYPE_CHECKING:
    import torch

VERSIONS = range(17, 25)  # of transformers 5: those that the tests passed with
FIRST_WITHOUT_TORCHVISION = 21  # of them: those before import all that they have, where classes are registered
FAMILIES = ("deepseek_v32", "glm_moe_dsa", "deepseek_v4")


def register(*, fp8_indexer: bool = False) -> None:
    """Every DeepseekV32, GlmMoeDsa and DeepseekV4 model that transformers makes from now on, by `from_pretrained` or
    `from_config`, runs on dsa's ops. A second call replaces what the first one said.

    fp8_indexer  False: index scores are of index queries and keys in the model's dtype, as transformers' are, up to
                 rounding; PyTorch computes them. True: index queries and keys go through the Hadamard transform and
                 e4m3, as the models were published; this has kernels on Hopper, for index_head_dim = 128, and an index
                 key takes 132 bytes in the cache. Prompts are scored as with `load_model`:
                 `dsa_layers.layers.score_accumulators`

    Raises ImportError without transformers, and RuntimeError for a version that was not tested, and for 5.17 to 5.20
    without torchvision, which these import while a model is made that has a registered class: `accelerate` needs none.
    """
    classes = _classes(fp8_indexer)
    version = _check_version()
    if version < FIRST_WITHOUT_TORCHVISION and importlib.util.find_spec("torchvision") is None:
        raise RuntimeError(
            f"transformers: 5.{version} cannot make a model with registered classes without torchvision; accepted: "
            f"5.{FIRST_WITHOUT_TORCHVISION} or later, torchvision, or `accelerate(model)` in the place of `register`"
        )
    from transformers.monkey_patching import register_patch_mapping

    register_patch_mapping({_pattern(original): own for original, own in classes.items()}, overwrite=True)


def unregister() -> None:
    """Ends `register`: transformers makes its own models from now on. Models that are there stay as they are."""
    patterns = {_pattern(original) for original in _classes(False)}
    from transformers.monkey_patching import get_patch_mapping, unregister_patch_mapping

    unregister_patch_mapping(sorted(patterns & get_patch_mapping().keys()))


def accelerate(model: "torch.nn.Module", *, fp8_indexer: bool = False) -> "torch.nn.Module":
    """Puts a model that transformers has made on dsa's ops, in place, and returns it. Only the classes of its
    attention, indexers, compressors and norms change; parameters, hooks and adapters stay. fp8_indexer as `register`
    has it.

    Raises ValueError for a model without layers of these families, and ImportError and RuntimeError as `register` does.
    """
    from torch import nn

    instance("model", model, nn.Module, "a torch.nn.Module")
    classes = _classes(fp8_indexer)
    # Those that the other value of fp8_indexer would have put there.
    classes |= {other: classes[original] for original, other in _classes(not fp8_indexer).items()}
    known = {*classes, *classes.values()}
    found = [module for module in model.modules() if type(module) in known]
    if not found:
        raise ValueError(
            "model: must have attention layers of DeepseekV32, GlmMoeDsa or DeepseekV4 as transformers makes them, "
            f"got {type(model).__name__}"
        )
    for module in found:
        module.__class__ = classes.get(type(module), type(module))
        if "_old_forward" in vars(module):  # the `accelerate` library calls it in the place of the class's
            module._old_forward = MethodType(type(module).forward, module)
        if hasattr(module, "takes_lengths"):
            module.takes_lengths()
    return model


def _pattern(original: type) -> str:
    """What transformers searches for in the names of its classes: this one, and not those that it is a part of."""
    return f"^{original.__name__}$"


def _classes(fp8_indexer: bool) -> dict[type, type]:
    """{transformers' class: the one in its place}."""
    flag("fp8_indexer", fp8_indexer)
    _check_version()
    families = [_family(name) for name in FAMILIES]
    return {original: own for family in families for original, own in family.classes(fp8_indexer).items()}


def _check_version() -> int:
    """The minor version of transformers."""
    try:
        import transformers
    except ImportError:
        raise ImportError("transformers: is not installed; pip install 'dsa-kernels[transformers]'") from None
    major, minor = map(int, transformers.__version__.split(".")[:2])
    if major != 5 or minor not in VERSIONS:
        raise RuntimeError(
            f"transformers: version {transformers.__version__} was not tested with dsa, which left its models as they "
            f"are; accepted: 5.{VERSIONS[0]} to 5.{VERSIONS[-1]}"
        )
    return minor


def _family(name: str) -> ModuleType:
    return importlib.import_module(f"dsa_layers.hf.{name}")
