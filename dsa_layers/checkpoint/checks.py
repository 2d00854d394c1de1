"""What a checkpoint's files must be like for the model that its config.json describes."""

import re
from pathlib import Path

from torch import nn

from dsa_layers.checkpoint.directory import Checkpoint, StoredNames
from dsa_layers.errors import CheckpointError, ConfigError
from dsa_layers.families.family import Family
from dsa_layers.families.model import CheckpointModel, ModelConfig
from dsa_layers.families.precision import Precision

_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
_BLOCK = 128  # columns that share a scale in FP8


def check_layers(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raises CheckpointError unless the files hold something of every layer.

    Making a layer takes milliseconds, so a config.json that speaks of a thousand costs nothing where they are not.
    """
    held = {int(match[1]) for match in map(_LAYER.search, checkpoint.tensors) if match}
    missing = [layer for layer in range(config.num_hidden_layers) if layer not in held]
    if missing:
        raise CheckpointError(
            f"{checkpoint.directory}: holds no tensor of layer {missing[0]}; "
            f"config.json has num_hidden_layers={config.num_hidden_layers}"
        )


def check_drafter(family: Family, model: CheckpointModel, stored: Checkpoint | StoredNames) -> None:
    """Raises ValueError for a family without drafters, and for a config.json that speaks of none; CheckpointError for
    files that hold nothing of one. model: without a drafter, so that it skips the tensors of one."""
    if family.drafter is None:
        raise ValueError(f"drafter: is not supported for model type {model.config.model_type!r}")
    path = stored.directory if stored.directory.is_file() else stored.directory / "config.json"
    layers = model.config.num_nextn_predict_layers
    if not layers:
        raise ValueError(f"drafter: {path} has num_nextn_predict_layers=0; accepted: a checkpoint with such a layer")
    if stored.tensors is not None and not any(map(model.skips, stored.tensors)):
        raise CheckpointError(
            f"{stored.directory}: drafter: holds no tensor of a multi-token-prediction layer; config.json has "
            f"num_nextn_predict_layers={layers}"
        )


def check_quantised_sizes(config: ModelConfig, precision: Precision, path: Path) -> None:
    """Raises ConfigError for a field of `config`, read from `path`, with which nothing can be quantised."""

    def refuse(name: str, problem: str, accepted: str) -> None:
        raise ConfigError(
            f"{path}: field '{name}' is {getattr(config, name)}{problem}; accepted: {accepted}. "
            "Without quantisation (dequantize=True) any size will do"
        )

    if precision.fp8_indexer and config.index_head_dim.bit_count() != 1:
        refuse("index_head_dim", "", "a power of two, as the Hadamard transform of quantised index keys needs")
    if not precision.fp8_linear:
        return
    for name, width in config.fp8_widths().items():
        if width % _BLOCK:
            problem = "" if width == getattr(config, name) else f", which makes a projection's input {width} wide"
            refuse(name, problem, f"a multiple of {_BLOCK}, the columns that share a scale in FP8")


def check_values(model: nn.Module, directory: Path) -> None:
    """Raises CheckpointError for values with which a module would read beyond its tensors, as a table of experts with
    one that is not there. Modules whose tensors hold such values have `check_values` (see `CheckpointModel`)."""
    for name, module in model.named_modules():
        if (check := getattr(module, "check_values", None)) is None:
            continue
        try:
            check()
        except ValueError as error:
            raise CheckpointError(f"{directory}: {name}.{error}") from None
