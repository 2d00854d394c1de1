"""GLM-5.3-Flash. Most layers have Kimi delta attention. The others have DeepSeek-V3.2's attention without rope, with an
indexer of pools. All layers have residual streams with DeepSeek-V4's hyper-connections.

Source: `Glm5NextTextModel` of transformers 5.
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn

from dsa_layers.cache.delta_kv_cache import DeltaKVCache, DeltaShape
from dsa_layers.cache.drafts import DRAFTS
from dsa_layers.config.fields import (
    MAX_HEADS,
    Declared,
    Fields,
    computed,
    each_of,
    epsilon,
    integer,
    number,
    one_of,
    only,
)
from dsa_layers.config.model_config import RopeConfig
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.hyper_connections import HyperConnection
from dsa_layers.layers.kimi_delta_attention import KimiDeltaAttention
from dsa_layers.layers.linear import Linear
from dsa_layers.layers.moe import MoE, SwiGLU
from dsa_layers.layers.pooled_indexer import PooledIndexer
from dsa_layers.layers.rope import RotaryEmbedding
from dsa_layers.models.deepseek_v32 import (
    TINY_CHANGES,
    DecoderBlock,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    DeepseekV32Model,
    attention,
    cache_layers,
    mlp,
    read_dense_layers,
)
from dsa_layers.models.family import Family, PublishedFormat, TinyFields
from dsa_layers.models.glm_moe_dsa import GlmMoeDsaDrafter
from dsa_layers.models.hy_v4 import HYV4DecoderBlock
from dsa_layers.models.precision import Precision

# The rope channels of queries and latents, all zero: the kernels need them.
ZERO_CHANNELS = 64
_DELTA, _FULL = "linear_attention", "indexed_attention"  # layer_types of transformers 5
_LISTED = _DELTA, _FULL, "deepseek_sparse_attention", "full_attention"  # the last two are other names of _FULL


@dataclass(frozen=True)
class DeltaConfig(Declared):
    """The sizes of the layers with Kimi delta attention, under the names of linear_attn_config."""

    num_heads: int = integer(maximum=MAX_HEADS)
    head_dim: int = integer(maximum=256)
    short_conv_kernel_size: int = integer(maximum=16)
    gate_lower_bound: float = number(minimum=-100, maximum=-1e-6)


_LINEAR = {  # {field of linear_attn_config: transformers' field at the top level}
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "linear_lower_bound",
}


def _read_layers(fields: Fields, known: SimpleNamespace) -> tuple[bool, ...]:
    """Read which layers have Kimi delta attention."""
    layers = known.num_hidden_layers
    listed = fields.read("layer_types", each_of(*_LISTED, counts={layers: "num_hidden_layers"}))
    return tuple(i % 4 != 3 for i in range(layers)) if listed is None else tuple(kind == _DELTA for kind in listed)


def _read_delta(fields: Fields, known: SimpleNamespace) -> DeltaConfig:
    """Read linear_attn_config, or transformers' fields at the top level."""
    nested = fields.object("linear_attn_config")
    if nested is None:
        declared = {field.name: field for field in dataclasses.fields(DeltaConfig)}
        return DeltaConfig(**{name: fields.read(top, declared[name]) for name, top in _LINEAR.items()})
    delta = DeltaConfig.read(nested)
    for has_delta, name in ((True, "kda_layers"), (False, "full_attn_layers")):
        nested.read(name, only([i for i, kind in enumerate(known.delta_layers) if kind == has_delta]))
    nested.read("safe_gate", only(True))
    nested.reject_unread()
    for name, top in _LINEAR.items():
        fields.read(top, only(getattr(delta, name)))
    return delta


@dataclass(frozen=True)
class Glm5NextConfig(DeepseekV32Config):
    """The fields of DeepSeek-V3.2's configuration, and these:

    delta_layers  for each layer, whether it has Kimi delta attention; the other layers have an indexer
    delta         the sizes of the layers with Kimi delta attention
    index_kpool   tokens per pool
    swiglu_limit  limit of every SwiGLU
    hc_mult       number of residual streams; hc_sinkhorn_iters, hc_eps: iterations and hc_eps of `dsa.hyper_collapse`
    """

    model_type: ClassVar[str] = "glm5_next"
    latent_norm_eps = property(lambda self: self.rms_norm_eps)
    has_fp8_cache = property(lambda self: self.kv_lora_rank == 512)
    checked: ClassVar[dict[str, Any]] = DeepseekV32Config.checked | {
        "index_kpool_always_select_tail": only(True),
        "index_kpool_compress": only(True),
        "mhc": only(True),
        "mla_use_nope": only(True),
        "moe_router_dtype": only("float32"),
    }

    first_k_dense_replace: int = computed(read_dense_layers)
    qk_rope_head_dim: int = only(0)
    rope: RopeConfig = computed(lambda fields, known: RopeConfig(1.0, None))  # unused: there are no rope channels
    indexer_rope_interleave: bool = only(True)  # without meaning: there is no rope
    index_share_for_mtp_iteration: bool = one_of(True, False, default=False)
    delta_layers: tuple[bool, ...] = computed(_read_layers)
    delta: DeltaConfig = computed(_read_delta)
    index_kpool: int = one_of(4, 8)  # a page of 256 tokens has 64 or 32 pools, as the kernel for index scores requires
    swiglu_limit: float = number()
    hc_mult: int = integer(maximum=64)
    hc_sinkhorn_iters: int = integer(maximum=1000)
    hc_eps: float = epsilon()

    def check_layer_types(self, fields: Fields) -> None:
        layers, pool = self.num_hidden_layers, self.index_kpool
        fields.read("indexer_types", only(["full"] * layers))
        fields.require(self.index_head_dim >= ZERO_CHANNELS, "index_head_dim", f"at least {ZERO_CHANNELS}")
        fields.require(self.index_topk % pool == 0, "index_topk", f"a multiple of index_kpool={pool}")


def _sparse_attention(config: Glm5NextConfig, precision: Precision) -> DSAAttention:
    """Return the attention of a layer with an indexer. As in the published checkpoint, kv_b_proj and the
    indexer have no FP8 weights."""
    layer = attention(config, precision, indexed=False, rope=False, rope_dim=ZERO_CHANNELS)
    rows = config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim)
    layer.kv_b_proj = Linear(config.kv_lora_rank, rows, dtype=precision.dtype)
    layer.indexer = PooledIndexer(
        config.hidden_size,
        config.q_lora_rank,
        n_heads=config.index_n_heads,
        head_dim=config.index_head_dim,
        top_k=config.index_topk,
        pool=config.index_kpool,
        quantize=precision.fp8_indexer,
        dtype=precision.dtype,
    )
    return layer


def _delta_attention(config: Glm5NextConfig, precision: Precision) -> KimiDeltaAttention:
    """Return the attention of a layer without an indexer. As in the published checkpoint, it has no FP8
    weights."""
    delta = config.delta
    return KimiDeltaAttention(
        config.hidden_size,
        delta.num_heads,
        dim=delta.head_dim,
        conv_width=delta.short_conv_kernel_size,
        lower_bound=delta.gate_lower_bound,
        eps=config.rms_norm_eps,
        dtype=precision.dtype,
    )


def _mlp(config: Glm5NextConfig, precision: Precision, *, dense: bool) -> MoE | SwiGLU:
    layer = mlp(config, precision, dense=dense, limit=config.swiglu_limit)
    swiglu = layer if dense else layer.shared_experts  # `mlp` sets the limit of the routed experts only
    swiglu.limit = config.swiglu_limit
    return layer


class Glm5NextModel(DeepseekV32Model):
    """`DeepseekV32Model` over residual streams, without rope. Every stream begins as the embedding; the final norm
    reads the mean of the streams."""

    def __init__(self, config: Glm5NextConfig, precision: Precision) -> None:
        super().__init__(config, precision)
        self._streams = config.hc_mult

    @staticmethod
    def make_rope(config: Glm5NextConfig) -> RotaryEmbedding:
        return RotaryEmbedding(torch.zeros(ZERO_CHANNELS // 2, device="cpu"))  # angle 0 at every position

    def make_layer(self, config: Glm5NextConfig, precision: Precision, layer: int) -> HYV4DecoderBlock:
        of_delta, dense = config.delta_layers[layer], layer < config.first_k_dense_replace
        parts = (
            (_delta_attention if of_delta else _sparse_attention)(config, precision),
            _mlp(config, precision, dense=dense),
        )
        hidden, eps = config.hidden_size, config.rms_norm_eps
        streams = {"iterations": config.hc_sinkhorn_iters, "eps": eps, "hc_eps": config.hc_eps}
        connections = (HyperConnection(hidden, config.hc_mult, **streams) for _ in range(2))
        return HYV4DecoderBlock(hidden, *parts, *connections, eps=eps)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(tokens)[:, None].expand(-1, self._streams, -1).contiguous()

    def collapse(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.float().mean(1).to(x.dtype))


class _WithStates:
    """The method `make_cache` of the model and of its drafter."""

    page_size = 256

    def _layers(self) -> tuple["Glm5NextForCausalLM", Sequence[nn.Module]]:
        """Return (the target model, the blocks whose attention layers use the cache)."""
        raise NotImplementedError

    def make_cache(
        self, num_pages: int, page_size: int = page_size, device: torch.device | str = "cpu", *, state_slots: int = 64
    ) -> DeltaKVCache:
        model, blocks = self._layers()
        config, precision = model.config, model.precision
        deltas = [_shape(block.self_attn) for block in blocks]
        options = cache_layers(config, precision, ("full",) * deltas.count(None))
        for name in ("num_layers", "index_layers"):
            del options[name]
        return DeltaKVCache(
            deltas,
            pool=config.index_kpool,
            drafts=0 if model.drafter is None else DRAFTS,
            dtype=precision.dtype,
            num_pages=num_pages,
            page_size=page_size,
            device=device,
            state_slots=state_slots,
            **options | {"latent_dim": config.kv_lora_rank + ZERO_CHANNELS},
        )


def _shape(layer: nn.Module) -> DeltaShape | None:
    if not isinstance(layer, KimiDeltaAttention):
        return None
    return DeltaShape(layer.conv_width, 3 * layer.n_heads * layer.dim, layer.n_heads, layer.dim)


class Glm5NextForCausalLM(_WithStates, DeepseekV32ForCausalLM):
    """GLM-5.3-Flash without its part for images. `forward` is that of `DeepseekV32ForCausalLM`."""

    body = Glm5NextModel
    other_parts = ("model.visual.",)

    def _layers(self) -> tuple["Glm5NextForCausalLM", Sequence[nn.Module]]:
        return self, self.model.layers

    def name_of(self, stored: str) -> str:
        stored = stored.replace("model.language_model.", "model.", 1).replace(".forget_gate.", ".")
        return super().name_of(re.sub(r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2", stored))

    def stored_name(self, name: str, mtp_layer: int = 0) -> str:
        return re.sub(r"\.(attn|ffn)_hc\.", r".hc_\1_", super().stored_name(name, mtp_layer))


def _drafter_block(config: Glm5NextConfig, precision: Precision, *, indexed: bool, dense: bool) -> DecoderBlock:
    parts = _sparse_attention(config, precision), _mlp(config, precision, dense=dense)
    return DecoderBlock(config.hidden_size, *parts, eps=config.rms_norm_eps)


class Glm5NextDrafter(_WithStates, GlmMoeDsaDrafter):
    """`GlmMoeDsaDrafter` with an indexer of pools. The block has one residual stream, without hyper-connections.

    Source: vLLM's and SGLang's code for GLM-5.3-Flash's drafter.
    """

    make_block = staticmethod(_drafter_block)

    def _layers(self) -> tuple[Glm5NextForCausalLM, Sequence[nn.Module]]:
        return self._target[0], (self.block,)


FAMILY = Family(
    Glm5NextConfig,
    Glm5NextForCausalLM,
    PublishedFormat(norm_dtype="BF16"),
    TinyFields(
        "glm5_next_config.json",
        {
            **TINY_CHANGES,
            "eos_token_id": [1],
            "indexer_types": ["full"] * 4,
            "layer_types": [_DELTA, "deepseek_sparse_attention"] * 2,
            "linear_attn_config": {
                "full_attn_layers": [1, 3],
                "gate_lower_bound": -5.0,
                "head_dim": 128,
                "kda_layers": [0, 2],
                "num_heads": 4,
                "short_conv_kernel_size": 4,
            },
            "mlp_layer_types": ["dense", *["sparse"] * 3],
            "num_hidden_layers": 4,
            "pad_token_id": 1,
        },
    ),
    Glm5NextDrafter,
)
