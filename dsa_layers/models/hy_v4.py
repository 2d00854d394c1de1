"""Hy4: DeepSeek-V3.2's attention with sinks and a gate, over residual streams with independent hyper-connections.

In the indexer, rope rotates the last 64 of 128 channels. A layer without an indexer attends to the same keys as the
previous layer.
Source: `HYV4` of transformers 5, except that rope rotates pairs (2i, 2i + 1), as in vLLM and SGLang. transformers 5.24
rotates channels (i, i + 32).
"""

import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.kv_cache import LayerCache
from dsa_layers.config.fields import Fields, anything, computed, each_of, epsilon, integer, number, one_of, only
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.hyper_connections import HyperConnection, HyperHead, IndependentHyperConnection
from dsa_layers.layers.moe import MoE, SwiGLU
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
from dsa_layers.models.glm_moe_dsa import GlmMoeDsaDrafter
from dsa_layers.models.precision import Precision


def _read_indexer_types(fields: Fields, known: SimpleNamespace) -> tuple[str, ...]:
    layers = known.num_hidden_layers
    listed = fields.read("indexer_types", each_of("full", "shared", counts={layers: "num_hidden_layers"}))
    if listed is None:
        return tuple("full" if i == 0 or i % 4 == 1 else "shared" for i in range(layers))
    fields.require(listed[0] == "full", "indexer_types", "a list that begins with 'full'")
    return listed


@dataclass(frozen=True)
class HYV4Config(DeepseekV32Config):
    """The fields of DeepSeek-V3.2's configuration, and these:

    hc_mult       number of residual streams
    hc_magnitude  `magnitude` of `IndependentHyperConnection`
    hc_eps        `hc_eps` of `IndependentHyperConnection` and `HyperHead`
    swiglu_limit  limit of the routed experts' SwiGLU; None for no limit (0 or less in config.json)
    """

    ignores_key_value_heads: ClassVar[bool] = True  # published files have 8, and 64 num_attention_heads
    model_type: ClassVar[str] = "hy_v4"
    checked: ClassVar[dict[str, Any]] = DeepseekV32Config.checked | {
        "learnable_sink_init": anything(),
        "enable_lm_head_fp32": only(True),
        "gated_mla": only(True),
        "gating_type": only("elementwise"),
        "learnable_sink": only(True),
        "use_dsa": only(True),
    }

    first_k_dense_replace: int = computed(read_dense_layers)
    n_group: int = integer(default=1)
    topk_group: int = integer(default=1)
    indexer_types: tuple[str, ...] = computed(_read_indexer_types)
    indexer_rope_interleave: bool = only(True)
    index_share_for_mtp_iteration: bool = one_of(True, False, default=False)
    hc_mult: int = integer(maximum=64)
    hc_magnitude: float = number()
    hc_eps: float = epsilon()
    swiglu_limit: float | None = computed(
        lambda fields, known: limit if (limit := fields.read("swiglu_limit", number(minimum=-1e9))) > 0 else None
    )


def _parts(
    config: HYV4Config, precision: Precision, *, indexed: bool, dense: bool
) -> tuple[DSAAttention, MoE | SwiGLU]:
    of_indexer = {"rope_dims": "last", "eps": config.rms_norm_eps}
    return (
        attention(config, precision, indexed=indexed, of_indexer=of_indexer, gate="x", sinks=True),
        mlp(config, precision, dense=dense, limit=config.swiglu_limit),
    )


class HYV4DecoderBlock(DecoderBlock):
    """A block over residual streams, with the hyper-connections `attn_hc` and `ffn_hc` around its sublayers.

    forward: see `DecoderBlock`. The argument x is the streams [T, n, hidden], and so is the first result.
    """

    def __init__(
        self,
        hidden: int,
        self_attn: DSAAttention,
        mlp: MoE | SwiGLU,
        attn_hc: IndependentHyperConnection | HyperConnection,
        ffn_hc: IndependentHyperConnection | HyperConnection,
        *,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(hidden, self_attn, mlp, eps=eps)
        self.attn_hc, self.ffn_hc = attn_hc, ffn_hc

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: TokenBatch,
        cache: LayerCache | None = None,
        selected: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        y, *weights = self.attn_hc.collapse(x)
        y, selected = self.self_attn(self.input_layernorm(y), cos, sin, batch, cache, selected)
        x = self.attn_hc.expand(y, x, *weights)
        y, *weights = self.ffn_hc.collapse(x)
        return self.ffn_hc.expand(self.mlp(self.post_attention_layernorm(y)), x, *weights), selected


def decoder_block(config: HYV4Config, precision: Precision, *, indexed: bool, dense: bool) -> HYV4DecoderBlock:
    """Return a layer of the model. indexed: see `attention`; dense: see `mlp` (deepseek_v32.py)."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    streams = {"magnitude": config.hc_magnitude, "eps": eps, "hc_eps": config.hc_eps}
    connections = (IndependentHyperConnection(hidden, config.hc_mult, **streams) for _ in range(2))
    return HYV4DecoderBlock(hidden, *_parts(config, precision, indexed=indexed, dense=dense), *connections, eps=eps)


class HYV4Model(DeepseekV32Model):
    """`DeepseekV32Model` with several residual streams. Every stream begins as the embedding; hc_head computes a
    weighted sum of the streams before the final norm."""

    make_block = staticmethod(decoder_block)

    def __init__(self, config: HYV4Config, precision: Precision) -> None:
        super().__init__(config, precision)
        eps = {"eps": config.rms_norm_eps, "hc_eps": config.hc_eps}
        self.hc_head = HyperHead(config.hidden_size, config.hc_mult, **eps)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(tokens)[:, None].expand(-1, self.hc_head.fn.shape[0], -1).contiguous()

    def collapse(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.hc_head(x))


# (pattern, replacement) for `re.sub`, from published names and the names of transformers 5 to the model's names
_RENAMES = (
    (r"\.hc_pre\.", "."),
    (r"\.hc_attn_layer\.hc_", ".attn_hc."),
    (r"\.hc_mlp_layer\.hc_", ".ffn_hc."),
    (r"\.hc_head\.hc_(head_)?", ".hc_head."),
    (r"\.linear_gate\.", ".gate_proj."),
    (r"\.learnable_sink_param$", ".sinks"),
)
# (pattern, replacement) for `re.sub`, from the model's names to published names
_PUBLISHED = (
    (r"\.attn_hc\.", ".hc_attn_layer.hc_pre.hc_"),
    (r"\.ffn_hc\.", ".hc_mlp_layer.hc_pre.hc_"),
    (r"\.hc_head\.", ".hc_head.hc_head_"),
    (r"\.self_attn\.gate_proj\.", ".self_attn.linear_gate."),
    (r"\.sinks$", ".learnable_sink_param"),
)


class HYV4ForCausalLM(DeepseekV32ForCausalLM):
    """Hy4. `forward` is that of `DeepseekV32ForCausalLM`."""

    body = HYV4Model
    mtp_norm = "final_layernorm."

    def name_of(self, stored: str) -> str:
        for pattern, own in _RENAMES:
            stored = re.sub(pattern, own, stored)
        return super().name_of(stored)

    def stored_name(self, name: str, mtp_layer: int = 0) -> str:
        for pattern, published in _PUBLISHED:
            name = re.sub(pattern, published, name)
        return super().stored_name(name, mtp_layer)

    def mtp_prefix(self, layer: int) -> str:
        return f"model.mtp_layers.{layer}."


def _drafter_block(config: HYV4Config, precision: Precision, *, indexed: bool, dense: bool) -> DecoderBlock:
    parts = _parts(config, precision, indexed=indexed, dense=dense)
    return DecoderBlock(config.hidden_size, *parts, eps=config.rms_norm_eps)


class HYV4Drafter(GlmMoeDsaDrafter):
    """`GlmMoeDsaDrafter` with Hy4's attention. The block has one residual stream, without hyper-connections.

    Source: vLLM's and SGLang's code for Hy4's drafter.
    """

    make_block = staticmethod(_drafter_block)


FAMILY = Family(
    HYV4Config,
    HYV4ForCausalLM,
    PublishedFormat(norm_dtype="BF16"),
    # The published FP8 files have blocks of 1 x 32 (MXFP8), which dsa does not read. The tiny ones have 128 x 128.
    TinyFields(
        "hy_v4_config.json",
        {
            **TINY_CHANGES,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "indexer_types": ["full", "full", "shared", "shared"],
            "layer_types": ["deepseek_sparse_attention"] * 4,
            "mlp_layer_types": ["dense", *["sparse"] * 3],
            "num_hidden_layers": 4,
            "pad_token_id": 1,
            "quantization_config": FP8_BLOCKS,
        },
    ),
    HYV4Drafter,
)
