"""Checks of a configuration before weights are read, and of weights after."""

from pathlib import Path

from torch import nn

from dsa_layers.config.model_config import ModelConfig
from dsa_layers.errors import CheckpointError, ConfigError
from dsa_layers.layers.indexer import FP8_DIM
from dsa_layers.layers.linear import BLOCK
from dsa_layers.models.precision import Precision


def check_quantised_sizes(config: ModelConfig, precision: Precision, path: Path) -> None:
    """Raises ConfigError for a field of `config`, read from `path`, with which nothing can be quantised."""
    if precision.fp8_indexer and config.index_head_dim != FP8_DIM:
        accepted = f"{FP8_DIM}, as quantised index keys have. With dequantize=True others will do"
        raise _refused(config, "index_head_dim", path, accepted)
    for name, width in config.fp8_widths().items() if precision.fp8_linear else ():
        if width % BLOCK:
            accepted = (
                f"a multiple of {BLOCK}, the columns that share an FP8 scale. With dequantize=True others will do"
            )
            makes = "" if width == getattr(config, name) else f", which makes a projection's input {width} wide"
            raise _refused(config, name, path, accepted, makes)
    for name, size in config.fp8_cache_sizes.items() if precision.kv_cache == "fp8" else ():
        if getattr(config, name) != size:
            accepted = f"{size}, as latents in FP8 have. With kv_cache='model' others will do"
            raise _refused(config, name, path, accepted)


def _refused(config: ModelConfig, name: str, path: Path, accepted: str, makes: str = "") -> ConfigError:
    return ConfigError(f"{path}: field '{name}' is {getattr(config, name)}{makes}; accepted: {accepted}")


def check_values(model: nn.Module, directory: Path) -> None:
    """Raises CheckpointError for values with which a module would read beyond its tensors, such as a missing expert's
    number in a table of experts. Modules whose tensors hold such values have `check_values` (see `CheckpointModel`)."""
    for name, module in model.named_modules():
        if (check := getattr(module, "check_values", None)) is None:
            continue
        try:
            check()
        except ValueError as error:
            raise CheckpointError(f"{directory}: {name}.{error}") from None
