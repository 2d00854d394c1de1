"""`Family`, the record from which `load_model` and the commands get the classes and formats of a model family."""

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
    """Return the fields of a published config.json in `dsa_layers/vendored`. The README there names the source."""
    return json.loads((VENDORED / file).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class PublishedFormat:
    """The differences between a family's published checkpoints and the model.

    norm_dtype     safetensors dtype of the norm weights; the model stores these weights in fp32
    e8m0_scales    whether the checkpoint stores power-of-two FP8 scales as F8_E8M0 instead of F32
    mtp_embedding  name of the copy of the embedding in each multi-token-prediction layer; None if no layer has a copy
    mtp_head       name of the copy of the head in each multi-token-prediction layer; None if no layer has a copy
    """

    norm_dtype: str = "F32"
    e8m0_scales: bool = False
    mtp_embedding: str | None = None
    mtp_head: str | None = None


@dataclass(frozen=True)
class TinyFields:
    """The configuration of a family's tiny checkpoint.

    published  file name of a published configuration in `dsa_layers/vendored`
    changes    the fields in which the tiny config.json differs from the published configuration
    """

    published: str
    changes: dict[str, Any]

    def fields(self, *, quantized: bool) -> dict[str, Any]:
        fields = published_config(self.published) | self.changes
        del fields["transformers_version"]  # transformers did not write the tiny config.json
        of_quantization = [name for name in ("expert_dtype", "quantization_config") if name in fields]
        quantization = {name: fields.pop(name) for name in of_quantization}
        return fields | quantization if quantized else fields


@dataclass(frozen=True)
class Family:
    """The record of a model family. The family's module in `dsa_layers/models` has a `Family` named FAMILY.

    config   the dataclass of the configuration
    model    callable (configuration, precision or None) -> the model, with newly initialised parameters
    format   the format of published checkpoints
    tiny     the configuration of the family's tiny checkpoint
    drafter  callable (model) -> its `Drafter`, a torch.nn.Module for the model's attribute `drafter`; None if no
             checkpoint of this family has a supported drafter
    """

    config: type[ModelConfig]
    model: Callable[[Any, Precision | None], CheckpointModel]
    format: PublishedFormat
    tiny: TinyFields
    drafter: Callable[[Any], Drafter] | None = None
