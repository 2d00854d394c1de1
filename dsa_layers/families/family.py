"""The record of a model family, by which the registry finds its parts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dsa_layers.families.drafter import Drafter
from dsa_layers.families.fields import Fields
from dsa_layers.families.model import CheckpointModel, ModelConfig
from dsa_layers.families.precision import Precision
from dsa_layers.families.published import published_config

# Tensor's name -> (shape, safetensors' name of the dtype).
Manifest = dict[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True)
class TinyFields:
    """config.json of a family's tiny checkpoint. published: the pinned configuration; changes: the fields in which the
    tiny one differs from it."""

    published: str
    changes: dict[str, Any]

    def fields(self, *, quantized: bool) -> dict[str, Any]:
        fields = published_config(self.published) | self.changes
        del fields["transformers_version"]  # which did not write this one
        of_quantization = [name for name in ("expert_dtype", "quantization_config") if name in fields]
        quantization = {name: fields.pop(name) for name in of_quantization}
        return fields | quantization if quantized else fields


@dataclass(frozen=True)
class Family:
    """A family: a folder of `dsa_layers/families`, called by its `model_type`, whose module `family` has one of these
    as FAMILY.

    read_config  (config.json's fields, generation_config.json's or None) -> the configuration
    model        (configuration, precision or None) -> the model, with the parameters that its layers make
    manifest     configuration -> the tensors of a published checkpoint
    tiny         config.json of the family's tiny checkpoint
    drafter      model -> its `Drafter`, a torch.nn.Module that becomes the model's `drafter` and has its tensors there;
                 None: of checkpoints of this family it is not supported
    """

    read_config: Callable[[Fields, Fields | None], ModelConfig]
    model: Callable[[Any, Precision | None], CheckpointModel]
    manifest: Callable[[Any], Manifest]
    tiny: TinyFields
    drafter: Callable[[Any], Drafter] | None = None
