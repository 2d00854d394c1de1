"""The record of a model family, by which the registry finds its parts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dsa_layers.families.drafter import Drafter
from dsa_layers.families.manifest import Manifest, PublishedFormat, manifest_of
from dsa_layers.families.model import CheckpointModel, ModelConfig
from dsa_layers.families.precision import Precision
from dsa_layers.families.published import published_config
from dsa_layers.families.unfilled import unfilled


@dataclass(frozen=True)
class TinyFields:
    """A family's tiny checkpoint.

    published  the pinned configuration
    changes    the fields in which the tiny config.json differs from it
    order      parts of tensors' names in the order in which the values are drawn; () for the manifest's order
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

    def drawing_order(self, manifest: Manifest) -> Manifest:
        """The manifest in the order in which the writer draws the values, from one generator. Another order changes
        every value of the checkpoint."""
        ranks = {part: rank for rank, part in enumerate(self.order)}
        if not ranks:
            return manifest

        def key(name: str) -> list[int]:
            return [int(part) if part.isdecimal() else ranks[part] for part in name.split(".")]

        return {name: manifest[name] for name in sorted(manifest, key=key)}


@dataclass(frozen=True)
class Family:
    """A family: a folder of `dsa_layers/families`, called by its `model_type`, whose module `family` has one of these
    as FAMILY.

    config       the dataclass of the configuration
    model        (configuration, precision or None) -> the model, with the parameters that its layers make
    format       how a published checkpoint stores the model's tensors
    tiny         config.json of the family's tiny checkpoint
    drafter      model -> its `Drafter`, a torch.nn.Module that becomes the model's `drafter` and has its tensors there;
                 None: of checkpoints of this family it is not supported
    """

    config: type[ModelConfig]
    model: Callable[[Any, Precision | None], CheckpointModel]
    format: PublishedFormat
    tiny: TinyFields
    drafter: Callable[[Any], Drafter] | None = None

    def manifest(self, config: ModelConfig) -> Manifest:
        """The tensors of a checkpoint in the published format, in the order of the layers. Without
        `config.quantization` all weights are BF16. A configuration with quantisation that does not name the experts'
        dtype is an early published one: FP4."""
        fp8 = config.quantization is not None
        fp4 = fp8 and config.quantization.expert_dtype != "fp8"
        precision = Precision(torch.bfloat16, fp8, fp8_indexer=False, kv_cache="model", fp4_experts=fp4)
        with unfilled():
            model = self.model(config, precision)
            if self.drafter is not None and config.num_nextn_predict_layers:
                model.drafter = self.drafter(model)
        return manifest_of(model, self.format)
