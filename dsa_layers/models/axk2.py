"""A.X-K2: DeepSeek-V3.2's model with other sizes, a gate on the attention output, and gated norms in the blocks.

Source: `AXK2` of transformers 5.
"""

from dataclasses import dataclass
from typing import ClassVar

from dsa_layers.config.fields import computed, integer
from dsa_layers.layers.norm import GatedRMSNorm
from dsa_layers.models.deepseek_v32 import (
    FP8_BLOCKS,
    TINY_CHANGES,
    DecoderBlock,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    DeepseekV32Model,
    attention,
    mlp,
    read_dense_layers,
)
from dsa_layers.models.family import Family, PublishedFormat, TinyFields
from dsa_layers.models.precision import Precision


@dataclass(frozen=True)
class AXK2Config(DeepseekV32Config):
    """The fields of DeepSeek-V3.2's configuration, and gated_norm_rank, the rank of the gates in `GatedRMSNorm`."""

    model_type: ClassVar[str] = "axk2"

    first_k_dense_replace: int = computed(read_dense_layers)
    n_group: int = integer(default=1)
    topk_group: int = integer(default=1)
    gated_norm_rank: int = integer()


def decoder_block(config: AXK2Config, precision: Precision, *, indexed: bool, dense: bool) -> DecoderBlock:
    """Return a layer of the model. Its norms are gated, except the norm before an MLP without experts."""
    parts = attention(config, precision, indexed=indexed, gate="queries"), mlp(config, precision, dense=dense)
    hidden, rank, eps = config.hidden_size, config.gated_norm_rank, config.rms_norm_eps
    block = DecoderBlock(hidden, *parts, eps=eps)
    block.input_layernorm = GatedRMSNorm(hidden, rank, eps, dtype=precision.dtype)
    if not dense:
        block.post_attention_layernorm = GatedRMSNorm(hidden, rank, eps, dtype=precision.dtype)
    return block


class AXK2Model(DeepseekV32Model):
    """`DeepseekV32Model` with A.X-K2's blocks."""

    make_block = staticmethod(decoder_block)


# {part of a tensor's name in files of transformers 5: the same part in published files}
_RENAMED = {"mlp.fc1.": "W_down.", "mlp.fc2.": "W_up.", "q_gate_proj.": "q_b_proj."}


class AXK2ForCausalLM(DeepseekV32ForCausalLM):
    """A.X-K2. `forward` is that of `DeepseekV32ForCausalLM`."""

    body = AXK2Model

    def name_of(self, stored: str) -> str:
        for theirs, published in _RENAMED.items():
            stored = stored.replace(theirs, published)
        return super().name_of(stored)


FAMILY = Family(
    AXK2Config,
    AXK2ForCausalLM,
    PublishedFormat(norm_dtype="BF16"),
    # A.X-K2-Light
    TinyFields(
        "axk2_light_config.json",
        {
            **TINY_CHANGES,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "num_attention_heads": 8,  # so that each of two ranks has whole 128-row blocks of q_b_proj
            "num_key_value_heads": 8,
            "mlp_layer_types": ["dense", *["sparse"] * 3],
            "num_hidden_layers": 4,
            "quantization_config": FP8_BLOCKS,
        },
    ),
)
