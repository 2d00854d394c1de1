"""The record of a model family, by which `load_model` and the commands find its parts."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsa_layers.config.model_config import ModelConfig
from dsa_layers.models.precision import Precision
from dsa_layers.models.protocols import CheckpointModel, Drafter

VENDORED = Path(__file__).parents[1] / "vendored"


def published_config(file: str) -> dict[str, Any]:
    """The fields of a published config.json that is stored in `dsa_layers/vendored`, whose README names its source."""
    return json.loads((VENDORED / file).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class PublishedFormat:
    """How a family's published checkpoints differ from the model that reads them.

    norm_dtype     safetensors' dtype of the norms, which the model keeps in fp32
    e8m0_scales    whether FP8 scales that are powers of two are F8_E8M0 and not F32
    mtp_embedding  name of the copy of the embedding in each multi-token-prediction layer; None: there is none
    mtp_head       the same of the head
    """

    norm_dtype: str = "F32"
    e8m0_scales: bool = False
    mtp_embedding: str | None = None
    mtp_head: str | None = None


@dataclass(frozen=True)
class TinyFields:
    """A family's tiny checkpoint.

    published  the file of a published configuration in `dsa_layers/vendored`
    changes    the fields in which the tiny config.json differs from it
    order      parts of tensors' names in the order in which random values are drawn; () for the order of the layers
    """

    published: str
    changes: dict[str, Any]
    order: tuple[str, ...] = ()

    def fields(self, *, quantized: bool) -> dict[str, Any]:
        fields = published_config(self.published) | self.changes
        del fields["transformers_version"]  # which did not write this one
        of_quantization = [name for name in ("expert_dtype", "quantization_config") if name in fields]
        quantization = {name: fields.pop(name) for name in of_quantization}
        return fields | quantization if quantized else fields


@dataclass(frozen=True)
class Family:
    """The parts of a family. Its module in `dsa_layers/models` has one of these as FAMILY.

    config   the dataclass of the configuration
    model    (configuration, precision or None) -> the model, with the parameters that its layers make
    format   how a published checkpoint stores the model's tensors
    tiny     config.json of the family's tiny checkpoint
    drafter  model -> its `Drafter`, a torch.nn.Module that becomes the model's `drafter` and has its tensors there;
             None: checkpoints of this family have no supported drafter
    """

    config: type[ModelConfig]
    model: Callable[[Any, Precision | None], CheckpointModel]
    format: PublishedFormat
    tiny: TinyFields
    drafter: Callable[[Any], Drafter] | None = None
