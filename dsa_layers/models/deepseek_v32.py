"""DeepSeek-V3.2: latent attention over the keys that a lightning indexer selects, and mixtures of experts.

Source: DeepSeek-V3.2's report (arXiv 2512.02556) and inference code.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn

from dsa_layers.batch.token_batch import TokenBatch, check_pass
from dsa_layers.cache.kv_cache import LatentStore, LayerCache, PagedKVCache
from dsa_layers.config.fields import Fields, computed, each_of, integer, one_of, only
from dsa_layers.config.model_config import ModelConfig, RopeConfig, read_rope
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.indexer import LightningIndexer
from dsa_layers.layers.linear import LanguageModelHead, Linear
from dsa_layers.layers.moe import GroupedSigmoidRouter, MoE, SwiGLU
from dsa_layers.layers.norm import RMSNorm
from dsa_layers.layers.rope import Angles, RotaryEmbedding, make_rotary, yarn_mscale
from dsa_layers.models.family import Family, PublishedFormat, TinyFields
from dsa_layers.models.precision import Precision
from dsa_layers.models.protocols import Drafter, check_states


@dataclass(frozen=True)
class DeepseekV32Config(ModelConfig):
    """The fields of DeepSeek-V3.2's configuration in addition to those of `ModelConfig`. Fields that are not listed
    here have the same name and value in config.json.

    rope                     rotary embedding of attention and indexer
    indexer_types            "full" or "shared" per layer. A full layer has an indexer. A shared layer has no indexer
                             and attends to the same keys as the last full layer before it
    indexer_rope_interleave  True: rope rotates the channel pairs (2i, 2i + 1) of index queries and keys. False: the
                             pairs (i, i + dim / 2)
    index_share_for_mtp_iteration  whether later steps of the drafter attend to the keys that the first step selected
    latent_norm_eps          the eps of q_a_layernorm and kv_a_layernorm; all other RMSNorms use rms_norm_eps
    """

    # transformers builds q_a_layernorm and kv_a_layernorm with this eps for any value of rms_norm_eps. GLM-5 publishes
    # rms_norm_eps = 1e-5, which would make the latents smaller by a relative 4.5e-6 / (mean square before the norm).
    latent_norm_eps: ClassVar[float] = 1e-6
    ignores_key_value_heads: ClassVar[bool] = False  # whether num_key_value_heads may have any value
    # The argument `sources` of `PagedKVCache`. It has no annotation, so that a subclass can declare it as a field.
    latent_sources = None
    ignores_head_dim: ClassVar[bool] = False  # whether head_dim may have any value
    model_type: ClassVar[str] = "deepseek_v32"
    checked: ClassVar[dict[str, Any]] = ModelConfig.checked | {
        "ep_size": only(1),
        "moe_layer_freq": only(1),
        "rope_interleave": only(True),  # attention's rope, not the indexer's
        "scoring_func": only("sigmoid"),
    }

    intermediate_size: int = integer()
    first_k_dense_replace: int = integer(minimum=0)
    n_group: int = integer()
    topk_group: int = integer()
    norm_topk_prob: bool = one_of(True, False)
    kv_lora_rank: int = integer()
    qk_nope_head_dim: int = integer()
    qk_rope_head_dim: int = integer()
    v_head_dim: int = integer()
    rope: RopeConfig = computed(read_rope)
    indexer_types: tuple[str, ...] = computed(lambda fields, known: ("full",) * known.num_hidden_layers)
    indexer_rope_interleave: bool = only(False)
    index_share_for_mtp_iteration: bool = only(False)

    @property
    def has_fp8_cache(self) -> bool:
        return self.kv_lora_rank == 512 and self.qk_rope_head_dim == 64

    @property
    def softmax_scale(self) -> float:
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        yarn = self.rope.yarn
        return scale * yarn_mscale(yarn.factor, yarn.mscale_all_dim) ** 2 if yarn else scale

    def check(self, fields: Fields) -> None:
        rope, nope = self.qk_rope_head_dim, self.qk_nope_head_dim
        layers, dense = self.num_hidden_layers, self.first_k_dense_replace
        heads = integer(default=None) if self.ignores_key_value_heads else only(self.num_attention_heads)
        fields.read("num_key_value_heads", heads)
        fields.read("qk_head_dim", only(nope + rope))
        # Configurations disagree on which channels head_dim counts. The model does not use head_dim.
        counted = integer(default=None) if self.ignores_head_dim else one_of(rope, nope, nope + rope, default=None)
        fields.read("head_dim", counted)
        fields.require(rope % 2 == 0, "qk_rope_head_dim", "an even number")
        fields.require(rope <= self.index_head_dim, "index_head_dim", f"at least qk_rope_head_dim={rope}")
        fields.require(dense <= layers, "first_k_dense_replace", f"at most num_hidden_layers={layers}")
        fields.read("mlp_layer_types", only(["dense"] * dense + ["sparse"] * (layers - dense)))
        self.check_layer_types(fields)

        groups, chosen = self.n_group, self.topk_group
        fields.require(self.n_routed_experts % groups == 0, "n_routed_experts", f"a multiple of n_group={groups}")
        of_group = self.n_routed_experts // groups
        fields.require(of_group >= 2, "n_group", "groups of 2 experts or more: the gate ranks a group by its best 2")
        fields.require(chosen <= groups, "topk_group", f"at most n_group={groups}")
        fits = self.num_experts_per_tok <= chosen * of_group
        fields.require(fits, "num_experts_per_tok", f"at most {chosen * of_group}, of {chosen} groups")

    def check_layer_types(self, fields: Fields) -> None:
        """Check that the field layer_types, if it is given, names the same kind for all layers."""
        # transformers 5.24 writes the first name.
        names = "indexed_attention", "deepseek_sparse_attention"
        fields.read("layer_types", one_of(*([name] * self.num_hidden_layers for name in names), default=None))


def read_dense_layers(fields: Fields, known: SimpleNamespace) -> int:
    """Read how many of the first layers have no experts, from first_k_dense_replace or the list mlp_layer_types of
    transformers 5. If neither field is given, return 1, as transformers' AXK2 and HYV4 do."""
    if "first_k_dense_replace" in fields:
        return fields.read("first_k_dense_replace", integer(minimum=0))
    counts = {known.num_hidden_layers: "num_hidden_layers"}
    kinds = fields.read("mlp_layer_types", each_of("dense", "sparse", counts=counts))
    return 1 if kinds is None else [*kinds, "sparse"].index("sparse")


class DecoderBlock(nn.Module):
    """A decoder block: x <- x + attention(norm(x)); x <- x + mlp(norm(x)).

    forward(x [T, hidden], cos, sin, batch, cache=None, selected=None) -> (x, selected), as in `DSAAttention`.
    Submodules have the checkpoint's names: input_layernorm, self_attn, post_attention_layernorm, mlp.
    """

    def __init__(self, hidden: int, self_attn: DSAAttention, mlp: MoE | SwiGLU, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = mlp

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: TokenBatch,
        cache: LayerCache | None = None,
        selected: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        y, selected = self.self_attn(self.input_layernorm(x), cos, sin, batch, cache, selected)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), selected


def attention(
    config: DeepseekV32Config,
    precision: Precision,
    *,
    indexed: bool,
    of_indexer: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> DSAAttention:
    """Return the attention layer of a block.

    indexed     whether the layer has an indexer
    of_indexer  further options of `LightningIndexer`
    options     further options of `DSAAttention`
    """
    projections = precision.projections(config)
    indexer = None
    if indexed:
        indexer = LightningIndexer(
            config.hidden_size,
            config.q_lora_rank or config.hidden_size,
            n_heads=config.index_n_heads,
            head_dim=config.index_head_dim,
            top_k=config.index_topk,
            rope_interleaved=config.indexer_rope_interleave,
            quantize=precision.fp8_indexer,
            **of_indexer,
            **projections,
        )
    sizes = {
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "nope_dim": config.qk_nope_head_dim,
        "rope_dim": config.qk_rope_head_dim,
        "v_dim": config.v_head_dim,
        "softmax_scale": config.softmax_scale,
        "eps": config.latent_norm_eps,
    }
    return DSAAttention(config.hidden_size, config.num_attention_heads, indexer, **projections, **(sizes | options))


def mlp(config: DeepseekV32Config, precision: Precision, *, dense: bool, limit: float | None = None) -> MoE | SwiGLU:
    """Return the MLP of a block.

    dense  whether the MLP is a `SwiGLU` without experts
    limit  the clamping limit of the routed experts (see `SwiGLU`)
    """
    projections = precision.projections(config)
    if dense:
        return SwiGLU(config.hidden_size, config.intermediate_size, **projections)
    router = GroupedSigmoidRouter(
        config.hidden_size,
        config.n_routed_experts,
        config.num_experts_per_tok,
        n_group=config.n_group,
        topk_group=config.topk_group,
        normalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        dtype=precision.dtype,
    )
    return moe(config, precision, router, limit=limit)


def moe(config: DeepseekV32Config, precision: Precision, router: nn.Module, *, limit: float | None = None) -> MoE:
    """Return the experts of a block. router: the layer that selects experts; limit: see `mlp`."""
    experts = {"n_shared": config.n_shared_experts, "limit": limit, "fp4_experts": precision.fp4_experts}
    projections = precision.projections(config)
    return MoE(config.hidden_size, config.moe_intermediate_size, router, **experts, **projections)


def decoder_block(config: DeepseekV32Config, precision: Precision, *, indexed: bool, dense: bool) -> DecoderBlock:
    """Return a layer of the model. indexed: see `attention`; dense: see `mlp`."""
    parts = attention(config, precision, indexed=indexed), mlp(config, precision, dense=dense)
    return DecoderBlock(config.hidden_size, *parts, eps=config.rms_norm_eps)


def cache_layers(config: DeepseekV32Config, precision: Precision, indexer_types: tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments of `PagedKVCache` that depend on the model, for layers with these `indexer_types`."""
    return {
        "num_layers": len(indexer_types),
        "latent_dim": config.kv_lora_rank + config.qk_rope_head_dim,
        "index_dim": config.index_head_dim,
        "latent": "fp8" if precision.kv_cache == "fp8" else precision.dtype,
        "index": "fp8" if precision.fp8_indexer else precision.dtype,
        "index_layers": [i for i, kind in enumerate(indexer_types) if kind == "full"],
    }


class DeepseekV32Model(nn.Module):
    """The embedding, the decoder blocks and the final norm: tokens int64 [T] -> hidden states [T, hidden_size]."""

    make_block: ClassVar[Callable[..., DecoderBlock]] = staticmethod(decoder_block)

    def __init__(self, config: DeepseekV32Config, precision: Precision) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, dtype=precision.dtype)
        self.layers = nn.ModuleList(self.make_layer(config, precision, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = self.make_rope(config)

    @staticmethod
    def make_rope(config: DeepseekV32Config) -> RotaryEmbedding:
        return make_rotary(config.qk_rope_head_dim, config.rope)

    def forward(self, tokens: torch.Tensor, batch: TokenBatch, cache: PagedKVCache | None = None) -> torch.Tensor:
        check_pass(tokens, batch, cache)
        angles, stores = self.layer_angles(batch.positions), self.latent_stores()
        x, selected = self.embed(tokens), None
        for i, layer in enumerate(self.layers):
            latents = stores[i] if cache is None else cache.layer(i)
            x, selected = layer(x, *angles[i], batch, latents, selected)
        return self.collapse(x)

    def layer_angles(self, positions: torch.Tensor) -> Sequence[Angles]:
        """Return each layer's (cos, sin), fp32 [T, rope_dim / 2]. positions: int64 [T]."""
        return (self.rotary(positions),) * len(self.layers)

    def latent_stores(self) -> Sequence[LatentStore | None]:
        """Return, for each layer, the `LatentStore` (or None) that it gets as `cache` in a pass without a KV cache."""
        return (None,) * len(self.layers)

    def make_layer(self, config: DeepseekV32Config, precision: Precision, layer: int) -> DecoderBlock:
        """Return block number `layer`."""
        indexed, dense = config.indexer_types[layer] == "full", layer < config.first_k_dense_replace
        return self.make_block(config, precision, indexed=indexed, dense=dense)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the input of the first block."""
        return self.embed_tokens(tokens)

    def collapse(self, x: torch.Tensor) -> torch.Tensor:
        """Return the hidden states after the final norm, from the output x of the last block."""
        return self.norm(x)


class DeepseekV32ForCausalLM(nn.Module):
    """The language model. Its parameters have the names of the published checkpoints (`model.*`, `lm_head.weight`),
    except for the experts (`Experts`) and the drafter (`name_of`).

    forward(tokens int64 [T], batch, cache=None, all_tokens=False) -> fp32 logits [B, vocab_size] for each sequence's
    last token. With all_tokens=True, and in decoding passes (`TokenBatch.is_decode`), the result is [T, vocab_size] for
    all tokens. `forward` applies `logits` to the result of `states`.
    `forward` raises TypeError or ValueError for wrong tokens, batch or cache. It does not check token ids.

    drafter: the checkpoint's multi-token-prediction layer, or None.
    """

    page_size = 64  # tokens; the kernel for index scores accepts pages of 32 or 64 FP8 keys
    body: ClassVar[type[DeepseekV32Model]] = DeepseekV32Model
    other_parts: ClassVar[tuple[str, ...]] = ()  # name prefixes of other parts' tensors, such as those for images
    mtp_norm: ClassVar[str] = "shared_head.norm."  # the final norm in a multi-token-prediction layer

    def __init__(self, config: DeepseekV32Config, precision: Precision | None = None) -> None:
        super().__init__()
        self.config = config
        self.precision = precision or Precision.of(config)
        self.model = self.body(config, self.precision)
        self.lm_head = LanguageModelHead(config.hidden_size, config.vocab_size, dtype=self.precision.dtype)
        self.drafter: Drafter | None = None

    def forward(
        self,
        tokens: torch.Tensor,
        batch: TokenBatch,
        cache: PagedKVCache | None = None,
        *,
        all_tokens: bool = False,
    ) -> torch.Tensor:
        hidden = self.states(tokens, batch, cache)
        if not all_tokens and not batch.is_decode:
            hidden = hidden[batch.last_tokens]
        return self.logits(hidden)

    def states(self, tokens: torch.Tensor, batch: TokenBatch, cache: PagedKVCache | None = None) -> torch.Tensor:
        """Return [T, hidden_size]: the hidden states of all tokens, after the final norm."""
        return self.model(tokens, batch, cache)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits [N, vocab_size] for any N rows of states, without rounding to 16 bits."""
        return self.lm_head(states)

    def make_cache(
        self, num_pages: int, page_size: int = page_size, device: torch.device | str = "cpu", *, state_slots: int = 64
    ) -> PagedKVCache:
        """Return a paged cache with this model's dimensions and precision, for up to `state_slots` sequences."""
        layers = cache_layers(self.config, self.precision, self.config.indexer_types)
        layers["sources"] = self.config.latent_sources
        return PagedKVCache(num_pages=num_pages, page_size=page_size, device=device, state_slots=state_slots, **layers)

    @property
    def captures_decode(self) -> bool:
        """Whether a CUDA graph can capture decoding passes.

        FP8 index keys are scored in their pages. Index keys of other dtypes are gathered first, with offsets from the
        host, which a graph cannot capture.
        """
        return self.precision.fp8_indexer

    def init_buffers(self, device: torch.device | str) -> None:
        """Compute the buffers that no checkpoint stores. Call this after construction on the meta device."""
        self.model.rotary.frequency_bits = self.body.make_rope(self.config).frequency_bits.to(device)

    def name_of(self, stored: str) -> str:
        """Return the model's name for a tensor of the checkpoint."""
        layer, name = self._mtp_part(stored)
        if layer != 0:
            return stored
        for copy, original in _COPIES.items():
            if name.startswith(copy):
                return original + name.removeprefix(copy)
        if name.startswith(self.mtp_norm):
            return "drafter.norm." + name.removeprefix(self.mtp_norm)
        return f"drafter.{name}" if name.startswith(("enorm.", "hnorm.", "eh_proj.")) else f"drafter.block.{name}"

    def stored_name(self, name: str, mtp_layer: int = 0) -> str:
        """Return the checkpoint's name for a tensor of the model; the inverse of `name_of`.

        mtp_layer: the multi-token-prediction layer in which the checkpoint stores the drafter's tensors.
        """
        if not name.startswith("drafter."):
            return name
        name = re.sub(r"^drafter\.(block\.)?", "", name)
        if name.startswith("norm."):
            name = self.mtp_norm + name.removeprefix("norm.")
        return self.mtp_prefix(mtp_layer) + name

    def skips(self, name: str) -> bool:
        """Return whether the loader skips a tensor of the checkpoint: the tensor belongs to one of `other_parts`, or to
        a multi-token-prediction layer from which the drafter does not read it."""
        if name.startswith(self.other_parts):
            return True
        layer, name = self._mtp_part(name)
        return layer is not None and (self.drafter is None or layer > 0 or name.startswith(tuple(_COPIES)))

    def mtp_prefix(self, layer: int) -> str:
        """Return the prefix of the checkpoint's names in a multi-token-prediction layer."""
        return f"model.layers.{self.config.num_hidden_layers + layer}."

    def _mtp_part(self, stored: str) -> tuple[int | None, str]:
        """Return (layer, name): the index of the multi-token-prediction layer with this tensor, and the tensor's name
        within that layer. Return (None, stored) if the tensor is in no such layer."""
        for layer in range(self.config.num_nextn_predict_layers):
            prefix = self.mtp_prefix(layer)
            if stored.startswith(prefix):
                return layer, stored.removeprefix(prefix)
        return None, stored


# {prefix in a multi-token-prediction layer: prefix in the model}. A checkpoint may store copies of these tensors there.
_COPIES = {"embed_tokens.": "model.embed_tokens.", "shared_head.head.": "lm_head."}


class DeepseekV32Drafter(nn.Module):
    """The `Drafter` of DeepSeek-V3.2: y[t] = norm(block(eh_proj([enorm(embed(token t + 1)) | hnorm(states[t])]))).

    states [T, hidden_size]: the target's hidden states after its final norm, or y of an earlier step. The drafter uses
    the target's embedding, rope angles and head. Parameters: enorm, hnorm, norm [hidden]; eh_proj [hidden, 2 hidden],
    which is never quantised; block, with experts and an indexer.
    Source: DeepSeek-V3's report (arXiv 2412.19437), section 2.2.
    """

    page_size = DeepseekV32ForCausalLM.page_size
    make_block: ClassVar[Callable[..., DecoderBlock]] = staticmethod(decoder_block)

    def __init__(self, target: DeepseekV32ForCausalLM) -> None:
        super().__init__()
        config, precision = target.config, target.precision
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.eh_proj = Linear(2 * hidden, hidden, dtype=precision.dtype)
        self.block = self.make_block(config, precision, indexed=True, dense=False)
        self.norm = RMSNorm(hidden, eps)
        self._target = (target,)  # the tuple prevents registration as a submodule

    def forward(
        self, tokens: torch.Tensor, states: torch.Tensor, batch: TokenBatch, cache: PagedKVCache | None = None
    ) -> torch.Tensor:
        check_pass(tokens, batch, cache)
        y, _ = self._step(self.block, tokens, states, batch, None if cache is None else cache.layer(0))
        return y

    def _step(
        self,
        block: DecoderBlock,
        tokens: torch.Tensor,
        states: torch.Tensor,
        batch: TokenBatch,
        cache: LayerCache | None,
        selected: Any = None,
    ) -> tuple[torch.Tensor, Any]:
        """Return (y, the block's `selected`). y: see the class. cache, selected: arguments of the block."""
        (target,) = self._target
        check_states(states, tokens, target.config.hidden_size)
        # Like all positions, position 0 uses the embedding of the next token. vLLM zeroes this embedding.
        e = self.enorm(self.embed(tokens))
        x = self.eh_proj(torch.cat((e, self.hnorm(states)), -1))
        x, selected = block(x, *self.angles(batch.positions), batch, cache, selected)
        return self.norm(x), selected

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._target[0].model.embed_tokens(tokens)

    def angles(self, positions: torch.Tensor) -> Angles:
        """Return the block's (cos, sin)."""
        return self._target[0].model.rotary(positions)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self._target[0].logits(states)

    def make_cache(
        self, num_pages: int, page_size: int = page_size, device: torch.device | str = "cpu", *, state_slots: int = 64
    ) -> PagedKVCache:
        (target,) = self._target
        layers = cache_layers(target.config, target.precision, ("full",))
        return PagedKVCache(num_pages=num_pages, page_size=page_size, device=device, state_slots=state_slots, **layers)


# quantization_config of tiny checkpoints, for families whose file in `dsa_layers/vendored` lacks it
FP8_BLOCKS = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
# Small values for the tiny checkpoints of families with this family's fields. Dimensions that kernels support only in
# some sizes keep their published values.
TINY_CHANGES = {
    "first_k_dense_replace": 1,
    "hidden_size": 512,
    "index_topk": 128,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": 256,
    "vocab_size": 2048,
}

FAMILY = Family(
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    PublishedFormat(norm_dtype="F32", mtp_embedding="embed_tokens.weight", mtp_head="shared_head.head.weight"),
    TinyFields("deepseek_v32_config.json", {**TINY_CHANGES, "n_group": 2, "num_hidden_layers": 4, "topk_group": 1}),
    DeepseekV32Drafter,
)
