"""The text model of multimodal Hy4 (text, images, videos). It equals Hy4, except for the eps of the latents' norms.

mrope, rope with three positions per token, equals ordinary rope for text, because a text token has three equal
positions.
Source: `HYV4VL` of transformers 5.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

from dsa_layers.config.fields import Fields, computed
from dsa_layers.config.model_config import RopeConfig, read_rope
from dsa_layers.models import hy_v4
from dsa_layers.models.family import Family


def _read_rope(fields: Fields, known: SimpleNamespace) -> RopeConfig:
    return read_rope(fields, known, ignored=("mrope_section",))


@dataclass(frozen=True)
class HYV4VLConfig(hy_v4.HYV4Config):
    """The fields of `HYV4Config`. The latents' norms use rms_norm_eps."""

    model_type: ClassVar[str] = "hy_v4_vl"
    latent_norm_eps = property(lambda self: self.rms_norm_eps)

    rope: RopeConfig = computed(_read_rope)


class HYV4VLForCausalLM(hy_v4.HYV4ForCausalLM):
    """The text model of multimodal Hy4. `forward` is that of `DeepseekV32ForCausalLM`."""

    other_parts = "vit.", "model.vision_tower."

    def name_of(self, stored: str) -> str:
        return super().name_of(stored.replace("model.language_model.", "model.", 1))


_TINY = hy_v4.FAMILY.tiny
FAMILY: Family = replace(
    hy_v4.FAMILY,
    config=HYV4VLConfig,
    model=HYV4VLForCausalLM,
    tiny=replace(_TINY, changes=_TINY.changes | {"model_type": "hy_v4_vl"}),
)
