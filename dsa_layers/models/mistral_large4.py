"""Mistral Large 4's text model: DeepSeek-V3.2's model with these differences:

- Queries have no latent: q = W_UQ x. The indexer computes its queries from LayerNorm(x).
- Queries of attention and indexer are scaled by a learned function of their position (`PositionScaling`).
- By default every fourth layer has no rope. The frequencies of the other layers are learned (LeRoPE).
- Layers can share selected keys, as in GLM-5.2, and latents.
- The router has softmax scores. A tanh limits the logits.
Source: `MistralLarge4` of transformers 5, and its conversion of published tensor names. No published checkpoint was
available.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import torch

from dsa_layers.cache.kv_cache import LatentStore
from dsa_layers.config.fields import Fields, computed, integer, integers, number, one_of, only
from dsa_layers.config.model_config import THETA, RopeConfig, read_yarn
from dsa_layers.layers.moe import MoE, SoftmaxRouter, SwiGLU
from dsa_layers.layers.rope import Angles, LearnedRotaryEmbedding, make_rotary
from dsa_layers.models.deepseek_v32 import (
    FP8_BLOCKS,
    TINY_CHANGES,
    DecoderBlock,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    DeepseekV32Model,
    attention,
    moe,
    read_dense_layers,
)
from dsa_layers.models.family import Family, PublishedFormat, TinyFields
from dsa_layers.models.glm_moe_dsa import read_indexer_types
from dsa_layers.models.precision import Precision


def _read_rope(fields: Fields, known: SimpleNamespace) -> RopeConfig:
    rope = fields.object("rope_parameters")
    fields.require(rope is not None, "rope_parameters", "an object")
    theta = rope.read("rope_theta", THETA)
    # With YaRN, require attention_factor = 1: without this field, transformers would scale cos and sin.
    yarn = rope.read("rope_type", one_of("default", "yarn")) == "yarn"
    rope.read("attention_factor", one_of(1.0) if yarn else only(1.0))
    return RopeConfig(theta, read_yarn(rope, mscale=0.0, mscale_all_dim=0.0))


def _read_rope_layers(fields: Fields, known: SimpleNamespace) -> tuple[bool, ...]:
    """Read which layers have rope. In no_rope_layers, 1 means rope, despite the name."""
    layers = known.num_hidden_layers
    interval = fields.read("no_rope_layer_interval", integer(default=4))
    listed = fields.read("no_rope_layers", integers(layers, "num_hidden_layers", maximum=1))
    if listed is None:
        return tuple((i + 1) % interval != 0 for i in range(layers))
    return tuple(value == 1 for value in listed)


def _read_sources(fields: Fields, known: SimpleNamespace) -> tuple[int, ...]:
    """Read kv_source_layers: for each layer, the layer whose latents it attends to."""
    layers = known.num_hidden_layers
    listed = fields.read("kv_source_layers", integers(layers, "num_hidden_layers", maximum=layers - 1))
    sources = tuple(range(layers)) if listed is None else listed
    for i, source in enumerate(sources):
        # transformers keeps only the last shared latent of layers with rope, and of those without.
        shared = [j for j in range(i) if j in sources[j + 1 :] and known.rope_layers[j] == known.rope_layers[i]]
        valid = source == i or (shared and source == shared[-1] and sources[source] == source)
        fields.require(
            valid,
            "kv_source_layers",
            f"for layer {i}, {i} or the last layer before it with latents that others share, and with rope as it has",
        )
    return sources


@dataclass(frozen=True)
class MistralLarge4Config(DeepseekV32Config):
    """The fields of DeepSeek-V3.2's configuration without q_lora_rank, and these:

    rope_layers              for each layer, whether it has rope (1 in no_rope_layers)
    latent_sources           for each layer, the layer whose latents it attends to (kv_source_layers)
    final_logit_softcapping  c in the logits c * tanh(z / c)
    """

    model_type: ClassVar[str] = "mistral_large4"
    latent_norm_eps = property(lambda self: self.rms_norm_eps)

    q_lora_rank: None = only(None)
    first_k_dense_replace: int = computed(read_dense_layers)
    n_group: int = only(1)
    topk_group: int = only(1)
    norm_topk_prob: bool = only(True)
    rope: RopeConfig = computed(_read_rope)
    indexer_types: tuple[str, ...] = computed(read_indexer_types)
    indexer_rope_interleave: bool = only(True)
    rope_layers: tuple[bool, ...] = computed(_read_rope_layers)
    latent_sources: tuple[int, ...] = computed(_read_sources)
    final_logit_softcapping: float = number()


def decoder_block(config: MistralLarge4Config, precision: Precision, layer: int) -> DecoderBlock:
    """Return a layer of the model."""
    rope, projections = config.rope_layers[layer], precision.projections(config)
    of_attention = attention(
        config,
        precision,
        indexed=config.indexer_types[layer] == "full",
        of_indexer={"norm_queries": True, "position_scaling": True},
        nope_dim=config.qk_nope_head_dim + (0 if rope else config.qk_rope_head_dim),
        rope=rope,
        position_scaling=True,
        shares_latents=config.latent_sources[layer] != layer,
    )
    if layer < config.first_k_dense_replace:
        mlp: SwiGLU | MoE = SwiGLU(config.hidden_size, config.intermediate_size, **projections)
    else:
        scale = config.routed_scaling_factor
        sizes = config.hidden_size, config.n_routed_experts, config.num_experts_per_tok
        mlp = moe(config, precision, SoftmaxRouter(*sizes, scale=scale, dtype=precision.dtype))
    return DecoderBlock(config.hidden_size, of_attention, mlp, eps=config.rms_norm_eps)


class MistralLarge4Model(DeepseekV32Model):
    """`DeepseekV32Model` in which some layers have no rope, and layers can share latents."""

    def __init__(self, config: MistralLarge4Config, precision: Precision) -> None:
        super().__init__(config, precision)
        self._rope_layers, self._sources = config.rope_layers, config.latent_sources

    @staticmethod
    def make_rope(config: MistralLarge4Config) -> LearnedRotaryEmbedding:
        return make_rotary(config.qk_rope_head_dim, config.rope, LearnedRotaryEmbedding)

    def make_layer(self, config: MistralLarge4Config, precision: Precision, layer: int) -> DecoderBlock:
        return decoder_block(config, precision, layer)

    def layer_angles(self, positions: torch.Tensor) -> Sequence[Angles]:
        cos, sin = self.rotary(positions)
        unrotated = torch.ones_like(cos), torch.zeros_like(sin)  # rotation by these angles changes nothing
        return [(cos, sin) if has_rope else unrotated for has_rope in self._rope_layers]

    def latent_stores(self) -> Sequence[LatentStore | None]:
        stores = {source: LatentStore() for layer, source in enumerate(self._sources) if source != layer}
        return [stores.get(source) for source in self._sources]


# (published, ours): whole dot-separated parts of tensor names
_NAMES = (
    ("tok_embeddings", "model.embed_tokens"),
    ("norm", "model.norm"),
    ("output", "lm_head"),
    ("lerope", "model.rotary"),
    ("layers", "model.layers"),
    ("gate", "mlp.gate"),
    ("experts", "mlp.experts"),
    ("shared_experts", "mlp.shared_experts"),
    ("feed_forward", "mlp"),
    ("w1", "gate_proj"),
    ("w2", "down_proj"),
    ("w3", "up_proj"),
    ("attention_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("attention", "self_attn"),
    ("wq", "q_b_proj"),
    ("wkv_a_with_mqa", "kv_a_proj_with_mqa"),
    ("wkv_b", "kv_b_proj"),
    ("wo", "o_proj"),
    ("kv_a_norm", "kv_a_layernorm"),
    ("ssmax_scaling.s", "softmax_scaling.scale"),
    ("ssmax_scaling.b", "softmax_scaling.bias"),
)
_OF_TRANSFORMERS = (
    ("language_model", "model"),
    ("model.model", "model"),
    ("rotary_emb", "rotary"),
    ("q_proj", "q_b_proj"),
)


def _renamed(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    name = f".{name}."
    for old, new in pairs:
        name = name.replace(f".{old}.", f".{new}.")
    return name[1:-1]


class MistralLarge4ForCausalLM(DeepseekV32ForCausalLM):
    """Mistral Large 4 without its parts for images and without its drafter. `forward` is that of
    `DeepseekV32ForCausalLM`."""

    body = MistralLarge4Model
    other_parts = (  # the parts for images, and the drafter, whose tensors are not known
        "model.vision_tower.",
        "model.multi_modal_projector.",
        "vision_encoder.",
        "pre_mm_projector_norm.",
        "patch_merger.",
        "vision_language_adapter.",
        "mtp_dspark.",
    )

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        limit = self.config.final_logit_softcapping
        return (super().logits(states) / limit).tanh() * limit

    def name_of(self, stored: str) -> str:
        return _renamed(stored, _OF_TRANSFORMERS if stored.startswith("model.") else _NAMES)

    def stored_name(self, name: str, mtp_layer: int = 0) -> str:
        return _renamed(name, ((own, published) for published, own in _NAMES))


FAMILY = Family(
    MistralLarge4Config,
    MistralLarge4ForCausalLM,
    PublishedFormat(norm_dtype="BF16"),
    # Layers 2 and 4 have no rope. Layers 1 and 4 attend to the keys that layers 0 and 3 select, and layers 3 and 4 to
    # the latents of layers 1 and 2. The FP8 format of the published files is not known.
    TinyFields(
        "mistral_large4_config.json",
        {name: value for name, value in TINY_CHANGES.items() if name != "q_lora_rank"}
        | {
            "bos_token_id": 0,
            "eos_token_id": 1,
            "indexer_types": ["full", "shared", "full", "full", "shared"],
            "kv_source_layers": [0, 1, 2, 1, 2],
            "no_rope_layers": [1, 1, 0, 1, 0],
            "num_hidden_layers": 5,
            "quantization_config": FP8_BLOCKS,
        },
    ),
)
