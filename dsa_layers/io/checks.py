"""What a checkpoint's files must be like for the model that its config.json describes."""

import re
from collections.abc import Iterable
from pathlib import Path

from torch import nn

from dsa_layers.errors import CheckpointError, ConfigError
from dsa_layers.families.family import Family
from dsa_layers.families.model import CheckpointModel, ModelConfig
from dsa_layers.families.precision import Precision
from dsa_layers.io.directory import LAYER, Checkpoint, StoredNames
from dsa_layers.layers.indexer import FP8_DIM
from dsa_layers.layers.linear import BLOCK

_MTP_LAYER = re.compile(r"^mtp\.(\d{1,9})\.")
_ROW_BYTES = 16  # of which a row of float experts' weights has whole ones


def check_layers(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raises CheckpointError unless the files hold something of every layer, and nothing of a layer beyond the last.

    Making a layer takes milliseconds, so a config.json that speaks of a thousand costs nothing where they are not.
    """
    held = {int(match[1]) for match in map(LAYER.search, checkpoint.tensors) if match}
    missing = [layer for layer in range(config.num_hidden_layers) if layer not in held]
    if missing:
        place = checkpoint.place_of(f"layers.{missing[0]}.")
        raise CheckpointError(
            f"{checkpoint.directory}: holds no tensor of layer {missing[0]}; "
            f"config.json has num_hidden_layers={config.num_hidden_layers}{place}"
        )
    last = max(held, default=-1)
    if last >= config.num_hidden_layers + config.num_nextn_predict_layers:
        raise CheckpointError(
            f"{checkpoint.directory}: holds tensors of layer {last}; config.json has "
            f"num_hidden_layers={config.num_hidden_layers} and "
            f"num_nextn_predict_layers={config.num_nextn_predict_layers}"
        )


def check_drafter(family: Family, model: CheckpointModel, stored: Checkpoint | StoredNames) -> None:
    """Raises ValueError for a family without drafters, and for a config.json that speaks of none; CheckpointError for
    files that lack one of these. model: without a drafter, so that it skips the tensors of one."""
    if family.drafter is None:
        raise ValueError(f"drafter: is not supported for model type {model.config.model_type!r}")
    path = stored.directory if stored.directory.is_file() else stored.directory / "config.json"
    layers = model.config.num_nextn_predict_layers
    if not layers:
        raise ValueError(f"drafter: {path} has num_nextn_predict_layers=0; accepted: a checkpoint with such a layer")
    if stored.tensors is None:
        return
    held = _mtp_layers(model.config, filter(model.skips, stored.tensors))
    missing = [layer for layer in range(layers) if layer not in held]
    if missing:
        raise CheckpointError(
            f"{stored.directory}: drafter: holds no tensor of multi-token-prediction layer {missing[0]}; config.json "
            f"has num_nextn_predict_layers={layers}"
        )


def _mtp_layers(config: ModelConfig, names: Iterable[str]) -> set[int]:
    """The numbers of the layers with these tensors: stored as `mtp.0`, or with the layers, after the last."""
    found = set()
    for name in names:
        if match := _MTP_LAYER.match(name):
            found.add(int(match[1]))
        elif match := LAYER.search(name):
            found.add(int(match[1]) - config.num_hidden_layers)
    return found


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


def check_expert_sizes(config: ModelConfig, precision: Precision, path: Path) -> None:
    """Raises ConfigError for a field of `config`, read from `path`, with which float experts cannot be multiplied:
    `torch.nn.functional.grouped_mm` takes rows at multiples of 16 bytes."""
    if precision.fp8_linear or "moe_intermediate_size" not in config.fp8_widths():
        return
    multiple = _ROW_BYTES // precision.dtype.itemsize
    for name in ("hidden_size", "moe_intermediate_size"):
        if getattr(config, name) % multiple:
            accepted = f"a multiple of {multiple}: experts' rows of {precision.dtype} must be whole {_ROW_BYTES} bytes"
            raise _refused(config, name, path, accepted)


def _refused(config: ModelConfig, name: str, path: Path, accepted: str, makes: str = "") -> ConfigError:
    return ConfigError(f"{path}: field '{name}' is {getattr(config, name)}{makes}; accepted: {accepted}")


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
