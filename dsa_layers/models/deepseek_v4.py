"""DeepSeek-V4: attention to a window and to compressed entries, hyper-connections, and mixtures of experts.

Source: DeepSeek-V4's report (arXiv 2606.19348) and inference code.
"""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn

from dsa_layers.batch.token_batch import TokenBatch, check_pass
from dsa_layers.cache.compressed_kv_cache import CompressedKVCache, CompressedLayerCache, EntryShape
from dsa_layers.config.fields import Fields, computed, each_of, epsilon, integer, number, one_of, only, refused
from dsa_layers.config.model_config import (
    THETA,
    ModelConfig,
    QuantizationConfig,
    RopeConfig,
    read_quantization,
    read_yarn,
)
from dsa_layers.layers.compressed_attention import Angles, CompressedAttention
from dsa_layers.layers.compressor import CompressedIndexer, Compressor
from dsa_layers.layers.hyper_connections import HyperConnection, HyperHead
from dsa_layers.layers.linear import LanguageModelHead, make_linear
from dsa_layers.layers.moe import MoE, SqrtSoftplusRouter
from dsa_layers.layers.norm import RMSNorm
from dsa_layers.layers.rope import JointRotary, RopeAngles, make_rotary
from dsa_layers.models import deepseek_v4_names as names
from dsa_layers.models.family import Family, PublishedFormat, TinyFields
from dsa_layers.models.precision import Precision
from dsa_layers.models.protocols import Drafter, check_states

# {layer type of transformers: tokens per compressed entry; 0 for layers without entries}
LAYER_TYPES = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}

# fields of releases with a DSpark drafter
_DSPARK = ("dspark_block_size", "dspark_markov_rank", "dspark_noise_token_id", "dspark_target_layer_ids")
_NO_DSPARK = refused("the DSpark drafter is not supported")


def _read_rope_dim(fields: Fields, known: SimpleNamespace) -> int:
    """Read qk_rope_head_dim, or transformers' partial_rotary_factor, the fraction of head_dim with rope."""
    part = fields.read("partial_rotary_factor", number(maximum=1.0, default=1.0))
    of_part = int(known.head_dim * part)
    rope_dim = fields.read("qk_rope_head_dim", integer(default=of_part))
    if "partial_rotary_factor" in fields and of_part != rope_dim:
        accepted = f"qk_rope_head_dim={rope_dim} / head_dim={known.head_dim}"
        raise fields.error("partial_rotary_factor", f"is {part}", accepted)
    return rope_dim


def _read_layer_types(fields: Fields, known: SimpleNamespace) -> tuple[str, ...]:
    """Read the type of each layer: from compress_ratios, which may list the multi-token-prediction layers at the end,
    or from transformers' layer_types."""
    if ("compress_ratios" in fields) == ("layer_types" in fields):
        given = "both given" if "layer_types" in fields else "not given"
        raise fields.error("compress_ratios", f"and field 'layer_types' are {given}", "one of them")
    layers, mtp = known.num_hidden_layers, known.num_nextn_predict_layers
    counts = {layers: "num_hidden_layers"}
    with_mtp = counts | ({layers + mtp: f"with num_nextn_predict_layers={mtp}"} if mtp else {})
    names = {ratio: name for name, ratio in LAYER_TYPES.items()}
    ratios = fields.read("compress_ratios", each_of(*names, counts=with_mtp))
    types = fields.read("layer_types", each_of(*LAYER_TYPES, counts=counts))
    return types if ratios is None else tuple(names[ratio] for ratio in ratios[:layers])


def _read_compress_rates(fields: Fields, known: SimpleNamespace) -> dict[str, int]:
    rates = {name: ratio for name, ratio in LAYER_TYPES.items() if ratio}
    given = fields.object("compress_rates")
    if given is not None:
        rates = {name: given.read(name, integer(maximum=2**12, default=ratio)) for name, ratio in rates.items()}
        given.reject_unread()
    return rates


def _read_hash_layers(fields: Fields, known: SimpleNamespace) -> tuple[bool, ...]:
    """Read which layers are hashed, that is, choose experts by the token id: the first num_hash_layers layers, or those
    that transformers' mlp_layer_types calls "hash_moe"."""
    layers = known.num_hidden_layers
    types = fields.read("mlp_layer_types", each_of("hash_moe", "moe", counts={layers: "num_hidden_layers"}))
    if types is not None:
        return tuple(kind == "hash_moe" for kind in types)
    count = fields.read("num_hash_layers", integer(minimum=0))
    return tuple(i < count for i in range(layers))


def _read_rope(kind: str, theta_field: str, fields: Fields, known: SimpleNamespace) -> RopeConfig:
    """Read the rope configuration of the kind "main" or "compress": from `theta_field` and, for "compress",
    rope_scaling, or from transformers' rope_parameters, which has one object per kind."""
    nested = fields.object("rope_parameters")
    if nested is None:
        scaling = fields.object("rope_scaling") if kind == "compress" else None
        return RopeConfig(fields.read(theta_field, THETA), read_yarn(scaling, mscale=0.0, mscale_all_dim=0.0))
    of_kind = {name: nested.object(name) for name in ("main", "compress")}
    nested.reject_unread()
    parameters = of_kind[kind]
    if parameters is None:
        raise nested.error(kind, "is missing", "an object")
    theta = parameters.read("rope_theta", THETA)
    fields.read(theta_field, only(theta))
    parameters.read("partial_rotary_factor", only(known.qk_rope_head_dim / known.head_dim))
    # The published model does not multiply cos and sin by YaRN's factor.
    parameters.read("attention_factor", only(1))
    return RopeConfig(theta, read_yarn(parameters, mscale=0.0, mscale_all_dim=0.0))


def _read_quantization(fields: Fields, known: SimpleNamespace) -> QuantizationConfig | None:
    """Read quantization_config, and expert_dtype from the top level, from quantization_config, or from both if
    equal."""
    accepted = one_of("fp4", "fp8", default=None)
    published = fields.read("expert_dtype", accepted)
    nested = fields.object("quantization_config")
    written = None if nested is None else nested.read("expert_dtype", accepted)
    if None not in (published, written) and written != published:
        raise fields.error("expert_dtype", f"is {published!r}", f"quantization_config.expert_dtype={written!r}")
    return read_quantization(nested, expert_dtype=published or written)


@dataclass(frozen=True)
class DeepseekV4Config(ModelConfig):
    """The fields of DeepSeek-V4's configuration in addition to those of `ModelConfig`. Fields that are not listed here
    have the name and the value of a field of config.json.

    layer_types     a key of LAYER_TYPES per layer
    compress_rates  {layer type: tokens per compressed entry}
    hash_layers     for each layer, whether it chooses experts by the token id
    rope            rope of the layers without entries
    compress_rope   rope of the layers with entries, including their entries and indexers
    """

    model_type: ClassVar[str] = "deepseek_v4"
    checked: ClassVar[dict[str, Any]] = {
        **dict.fromkeys(_DSPARK, _NO_DSPARK),
        **ModelConfig.checked,
        "num_key_value_heads": only(1),
        "scoring_func": only("sqrtsoftplus"),
        "norm_topk_prob": only(True),
        "router_jitter_noise": only(0),
    }

    head_dim: int = integer()
    qk_rope_head_dim: int = computed(_read_rope_dim)
    o_groups: int = integer()
    o_lora_rank: int = integer()
    sliding_window: int = integer(maximum=2**13)  # in tokens; a sequence's ring of cached keys grows with it
    layer_types: tuple[str, ...] = computed(_read_layer_types)
    compress_rates: dict[str, int] = computed(_read_compress_rates)
    hash_layers: tuple[bool, ...] = computed(_read_hash_layers)
    swiglu_limit: float = number()
    hc_mult: int = integer(maximum=2**6)
    hc_sinkhorn_iters: int = integer(maximum=1000)
    hc_eps: float = epsilon()
    rope: RopeConfig = computed(partial(_read_rope, "main", "rope_theta"))
    compress_rope: RopeConfig = computed(partial(_read_rope, "compress", "compress_rope_theta"))
    quantization: QuantizationConfig | None = computed(_read_quantization)

    @property
    def has_fp8_cache(self) -> bool:
        return self.head_dim == 512 and self.qk_rope_head_dim == 64

    def check(self, fields: Fields) -> None:
        rope, heads, experts = self.qk_rope_head_dim, self.num_attention_heads, self.n_routed_experts
        most = min(self.head_dim, self.index_head_dim)
        fields.require(rope % 2 == 0 and rope <= most, "qk_rope_head_dim", f"an even number up to {most}")
        fields.require(heads % self.o_groups == 0, "o_groups", f"a divisor of num_attention_heads={heads}")
        fields.require(self.num_experts_per_tok <= experts, "num_experts_per_tok", f"at most {experts}, all experts")


class HyperDecoderBlock(nn.Module):
    """Attention, then experts, with hyper-connections around both: n streams X [T, n, hidden] -> [T, n, hidden].

    For each sublayer: x = collapse(X); X <- expand(sublayer(norm(x)), X), with the methods of `hc_attn` or `hc_ffn`.
    forward(X, tokens int64 [T], rope, entry_rope, batch, cache=None): the last four as in `CompressedAttention`.
    Submodules: hc_attn, attn_norm, attn, hc_ffn, ffn_norm, ffn.
    """

    def __init__(
        self,
        hidden: int,
        attn: CompressedAttention,
        ffn: MoE,
        *,
        hc_attn: HyperConnection,
        hc_ffn: HyperConnection,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.hc_attn, self.attn_norm, self.attn = hc_attn, RMSNorm(hidden, eps), attn
        self.hc_ffn, self.ffn_norm, self.ffn = hc_ffn, RMSNorm(hidden, eps), ffn

    def forward(
        self,
        streams: torch.Tensor,
        tokens: torch.Tensor,
        rope: Angles,
        entry_rope: Angles | None,
        batch: TokenBatch,
        cache: CompressedLayerCache | None = None,
    ) -> torch.Tensor:
        x, *weights = self.hc_attn.collapse(streams)
        y = self.attn(self.attn_norm(x), rope, entry_rope, batch, cache)
        streams = self.hc_attn.expand(y, streams, *weights)
        x, *weights = self.hc_ffn.collapse(streams)
        y = self.ffn(self.ffn_norm(x), tokens)
        return self.hc_ffn.expand(y, streams, *weights)


def hyper_block(config: DeepseekV4Config, precision: Precision, kind: str, *, hashed: bool) -> HyperDecoderBlock:
    """Return a layer of the model. kind: a key of LAYER_TYPES. hashed: whether the token id chooses the experts."""
    hidden, eps, dtype = config.hidden_size, config.rms_norm_eps, precision.dtype
    projections = precision.projections(config)
    ratio = config.compress_rates.get(kind)
    compressor = indexer = None
    if ratio is not None:
        indexed = kind == "compressed_sparse_attention"
        options = {"overlap": indexed, "eps": eps, "dtype": dtype}
        compressor = Compressor(hidden, config.head_dim, ratio, **options)
        if indexed:
            indexer = CompressedIndexer(
                hidden,
                config.q_lora_rank,
                Compressor(hidden, config.index_head_dim, ratio, **options),
                n_heads=config.index_n_heads,
                top_k=config.index_topk,
                quantize=precision.fp8_indexer,
                **projections,
            )
    attention = CompressedAttention(
        hidden,
        config.num_attention_heads,
        dim=config.head_dim,
        window=config.sliding_window,
        q_lora_rank=config.q_lora_rank,
        o_groups=config.o_groups,
        o_lora_rank=config.o_lora_rank,
        compressor=compressor,
        indexer=indexer,
        eps=eps,
        **projections,
    )
    router = SqrtSoftplusRouter(
        hidden,
        config.n_routed_experts,
        config.num_experts_per_tok,
        hash_tokens=config.vocab_size if hashed else None,
        scale=config.routed_scaling_factor,
        dtype=dtype,
    )
    limits = {"limit": config.swiglu_limit, "shared_limit": config.swiglu_limit}
    experts = {"n_shared": config.n_shared_experts, "fp4_experts": precision.fp4_experts, **limits}
    ffn = MoE(hidden, config.moe_intermediate_size, router, **experts, **projections)
    streams = {"iterations": config.hc_sinkhorn_iters, "eps": eps, "hc_eps": config.hc_eps}
    hc_attn, hc_ffn = (HyperConnection(hidden, config.hc_mult, **streams) for _ in range(2))
    return HyperDecoderBlock(hidden, attention, ffn, hc_attn=hc_attn, hc_ffn=hc_ffn, eps=eps)


def make_cache(
    model: "DeepseekV4ForCausalLM", layers: list[CompressedAttention], num_pages: int, page_size: int, **options: Any
) -> CompressedKVCache:
    """Return a cache for attention layers of the model or of its drafter. options: device and state_slots."""
    config, precision = model.config, model.precision
    return CompressedKVCache(
        [(_entries(layer.compressor), _entries(layer.indexer and layer.indexer.compressor)) for layer in layers],
        num_pages,
        page_size,
        window=config.sliding_window,
        dim=config.head_dim,
        entries="fp8" if precision.kv_cache == "fp8" else precision.dtype,
        index="fp8" if precision.fp8_indexer else precision.dtype,
        **options,
    )


def _entries(compressor: Compressor | None) -> EntryShape | None:
    return compressor and EntryShape(compressor.ratio, compressor.dim, compressor.state_shape)


class DeepseekV4ForCausalLM(nn.Module):
    """The language model. Its parameters have the names of the published checkpoints, except for the experts
    (`Experts`) and the names that `deepseek_v4_names` changes.

    forward(tokens int64 [T], batch, cache=None, all_tokens=False) -> fp32 logits [B, vocab_size] for each sequence's
    last token. With all_tokens=True, and in decoding passes (`TokenBatch.is_decode`), the result is [T, vocab_size] for
    all tokens. `forward` applies `logits` to the result of `states`.
    `forward` raises TypeError or ValueError for wrong tokens, batch or cache. It does not check token ids.

    drafter: the checkpoint's multi-token-prediction layer, or None.
    """

    # Tokens per page. With 4 tokens per entry, a page has 64 entries; with 128 tokens per entry, it has 2.
    page_size = 256
    other_parts: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: DeepseekV4Config, precision: Precision | None = None) -> None:
        super().__init__()
        self.config = config
        self.precision = precision or Precision.of(config)
        hidden, dtype = config.hidden_size, self.precision.dtype
        self.embed = nn.Embedding(config.vocab_size, hidden, dtype=dtype)
        self.layers = nn.ModuleList(
            hyper_block(config, self.precision, kind, hashed=hashed)
            for kind, hashed in zip(config.layer_types, config.hash_layers)
        )
        self.hc_head = HyperHead(hidden, config.hc_mult, eps=config.rms_norm_eps, hc_eps=config.hc_eps)
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.head = LanguageModelHead(hidden, config.vocab_size, dtype=dtype)
        self.drafter: Drafter | None = None
        self.init_buffers(self.head.weight.device)

    def forward(
        self,
        tokens: torch.Tensor,
        batch: TokenBatch,
        cache: CompressedKVCache | None = None,
        *,
        all_tokens: bool = False,
    ) -> torch.Tensor:
        streams = self.states(tokens, batch, cache)
        if not all_tokens and not batch.is_decode:
            streams = streams[batch.last_tokens]
        return self.logits(streams)

    def states(self, tokens: torch.Tensor, batch: TokenBatch, cache: CompressedKVCache | None = None) -> torch.Tensor:
        """Return [T, hc_mult, hidden_size]: the residual streams of all tokens, after the last layer."""
        check_pass(tokens, batch, cache)
        streams = self.first_streams(tokens)
        angles = dict(zip(self._angle_kinds(), self.joint_rotary(batch.positions)))
        for i, layer in enumerate(self.layers):
            ratio = self.config.compress_rates.get(self.config.layer_types[i])
            rope = angles["main" if ratio is None else "compress", 1]
            entry_rope = None if ratio is None else angles["compress", ratio]
            streams = layer(streams, tokens, rope, entry_rope, batch, None if cache is None else cache.layer(i))
        return streams

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits [N, vocab_size] for any N rows of states [N, hc_mult, hidden_size]."""
        return self.head(self.norm(self.hc_head(states)))

    def _angle_kinds(self) -> list[tuple[str, int]]:
        """Return (kind of rope, ratio) for all rope angles that the layers need: first those of tokens, with ratio 1,
        then those of compressed entries of `ratio` tokens."""
        ratios = {self.config.compress_rates.get(kind) for kind in self.config.layer_types}
        of_entries = [("compress", ratio) for ratio in sorted(ratios - {None})]
        own = [("main", 1)] if None in ratios else []
        return [*own, *([("compress", 1)] if of_entries else []), *of_entries]

    def first_streams(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return [T, hc_mult, hidden]: one copy of the tokens' embeddings per stream."""
        return self.embed(tokens[:, None].expand(-1, self.config.hc_mult))

    def make_cache(
        self, num_pages: int, page_size: int = page_size, device: torch.device | str = "cpu", *, state_slots: int = 64
    ) -> CompressedKVCache:
        """Return a cache with this model's dimensions and precision, for up to `state_slots` sequences."""
        attentions = [layer.attn for layer in self.layers]
        return make_cache(self, attentions, num_pages, page_size, device=device, state_slots=state_slots)

    @property
    def captures_decode(self) -> bool:
        """Whether a CUDA graph can capture decoding passes.

        FP8 index keys are scored in their pages. Index keys of other dtypes are gathered first, with offsets from the
        host, which a graph cannot capture.
        """
        return self.precision.fp8_indexer

    def init_buffers(self, device: torch.device | str) -> None:
        """Compute the buffers that no checkpoint stores. Call this after construction on the meta device."""
        config = self.config
        ropes = {"main": config.rope, "compress": config.compress_rope}
        rotaries = {kind: make_rotary(config.qk_rope_head_dim, rope) for kind, rope in ropes.items()}
        self.rotaries = nn.ModuleDict(rotaries).to(device)
        kinds = self._angle_kinds()
        self.joint_rotary = JointRotary([(self.rotaries[kind], ratio) for kind, ratio in kinds])

    name_of = staticmethod(names.name_of)
    stored_name = staticmethod(names.stored_name)

    def skips(self, name: str) -> bool:
        return names.skips(name, drafter=self.drafter is not None)


class DeepseekV4Drafter(nn.Module):
    """The `Drafter` of DeepSeek-V4: Y[t] = block(e_proj(enorm(embed(token t + 1))) + h_proj(hnorm(X[t]))).

    X = states [T, hc_mult, hidden_size]: the target's streams, or Y of an earlier step. The embedding term is added to
    every stream. logits = head(norm(hc_head(Y))). The block attends to the window only, and chooses experts by router
    scores. The drafter uses the target's embedding, rope angles and `head`.
    Parameters: e_proj, h_proj [hidden, hidden], FP8 if the target's projections are; enorm, hnorm, norm [hidden];
    hc_head; block.
    Source: `MTPBlock` of DeepSeek-V4's inference code.
    """

    page_size = DeepseekV4ForCausalLM.page_size

    def __init__(self, target: DeepseekV4ForCausalLM) -> None:
        super().__init__()
        config, precision = target.config, target.precision
        hidden, eps = config.hidden_size, config.rms_norm_eps
        projections = precision.projections(config)
        self.enorm, self.hnorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.e_proj, self.h_proj = (make_linear(hidden, hidden, **projections) for _ in range(2))
        self.block = hyper_block(config, precision, "sliding_attention", hashed=False)
        self.hc_head = HyperHead(hidden, config.hc_mult, eps=eps, hc_eps=config.hc_eps)
        self.norm = RMSNorm(hidden, eps)
        self._target = (target,)  # the tuple prevents registration as a submodule

    def forward(
        self, tokens: torch.Tensor, states: torch.Tensor, batch: TokenBatch, cache: CompressedKVCache | None = None
    ) -> torch.Tensor:
        check_pass(tokens, batch, cache)
        (target,) = self._target
        check_states(states, tokens, target.config.hc_mult, target.config.hidden_size)
        rope = RopeAngles(target.rotaries["main"](batch.positions))
        # Position 0, too, uses the embedding of the next token; vLLM zeroes it there.
        e = self.e_proj(self.enorm(target.embed(tokens)))
        streams = self.h_proj(self.hnorm(states)) + e[:, None]
        return self.block(streams, tokens, rope, None, batch, None if cache is None else cache.layer(0))

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        (target,) = self._target
        return target.head(self.norm(self.hc_head(states)))

    def make_cache(
        self, num_pages: int, page_size: int = page_size, device: torch.device | str = "cpu", *, state_slots: int = 64
    ) -> CompressedKVCache:
        (target,) = self._target
        return make_cache(target, [self.block.attn], num_pages, page_size, device=device, state_slots=state_slots)


_TINY = TinyFields(
    "deepseek_v4_flash_config.json",
    {
        "compress_ratios": [0, 4, 128, 4, 0],
        "hidden_size": 512,
        "index_topk": 64,
        "moe_intermediate_size": 256,
        "n_routed_experts": 8,
        "num_attention_heads": 8,
        "num_experts_per_tok": 2,
        "num_hash_layers": 1,
        "num_hidden_layers": 4,
        "o_groups": 2,
        "o_lora_rank": 128,
        "q_lora_rank": 256,
        "vocab_size": 2048,
    },
)

FAMILY = Family(
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    PublishedFormat(norm_dtype="BF16", e8m0_scales=True),
    _TINY,
    DeepseekV4Drafter,
)
