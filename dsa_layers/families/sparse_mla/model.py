"""The model of the families with latent attention, lightning-indexer selection and mixture-of-experts MLPs."""

import torch
from torch import nn

from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.kv_cache import PagedKVCache
from dsa_layers.families.precision import Precision
from dsa_layers.families.rotary import make_rotary
from dsa_layers.families.sparse_mla.config import SparseMLAConfig
from dsa_layers.layers.attention import DSAAttention, Selection
from dsa_layers.layers.decoder import DecoderBlock
from dsa_layers.layers.embedding import Embedding
from dsa_layers.layers.indexer import LightningIndexer
from dsa_layers.layers.linear import Linear, linear_fp32
from dsa_layers.layers.moe import GroupedSigmoidRouter, MoE, SwiGLU
from dsa_layers.layers.norm import RMSNorm
from dsa_layers.layers.rope import yarn_mscale
from dsa_layers.layers.shares import Shares
from dsa_layers.parallel.ranks import ALONE
from dsa_layers.parallel.rows import rows_of


def _softmax_scale(config: SparseMLAConfig) -> float:
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    yarn = config.rope.yarn
    return scale * yarn_mscale(yarn.factor, yarn.mscale_all_dim) ** 2 if yarn else scale


def _block(config: SparseMLAConfig, precision: Precision, layer: int) -> DecoderBlock:
    hidden, eps, dtype = config.hidden_size, config.rms_norm_eps, precision.dtype
    projections = precision.projections(config)
    indexer = None
    if config.indexer_types[layer] == "full":
        indexer = LightningIndexer(
            hidden,
            config.q_lora_rank,
            n_heads=config.index_n_heads,
            head_dim=config.index_head_dim,
            top_k=config.index_topk,
            rope_interleaved=config.indexer_rope_interleave,
            quantize=precision.fp8_indexer,
            **projections,
        )
    attention = DSAAttention(
        hidden,
        config.num_attention_heads,
        indexer,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        nope_dim=config.qk_nope_head_dim,
        rope_dim=config.qk_rope_head_dim,
        v_dim=config.v_head_dim,
        softmax_scale=_softmax_scale(config),
        eps=config.latent_norm_eps,
        **projections,
    )
    if layer < config.first_k_dense_replace:
        return DecoderBlock(hidden, attention, SwiGLU(hidden, config.intermediate_size, **projections), eps=eps)
    router = GroupedSigmoidRouter(
        hidden,
        config.n_routed_experts,
        config.num_experts_per_tok,
        n_group=config.n_group,
        topk_group=config.topk_group,
        normalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        dtype=dtype,
    )
    experts = {"n_shared": config.n_shared_experts, "fp4_experts": precision.fp4_experts}
    moe = MoE(hidden, config.moe_intermediate_size, router, **experts, **projections)
    return DecoderBlock(hidden, attention, moe, eps=eps)


class SparseMLAModel(nn.Module):
    """Embedding, decoder blocks, final norm: tokens int64 [T] -> hidden states [T, hidden_size].

    What a layer with an indexer selects is handed on to the layers after it that have none, within a pass.
    """

    ranks = ALONE

    def __init__(self, config: SparseMLAConfig, precision: Precision) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=precision.dtype)
        self.layers = nn.ModuleList(_block(config, precision, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = make_rotary(config.qk_rope_head_dim, config.rope)

    def forward(self, tokens: torch.Tensor, batch: TokenBatch, cache: PagedKVCache | None = None) -> torch.Tensor:
        cos, sin = self.rotary(batch.positions)
        rows, selection = rows_of(batch, self.ranks), Selection()
        x = rows.sum(self.embed_tokens(tokens))
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, batch, None if cache is None else cache.layer(i), selection, rows)
        (x,) = rows.gather(self.norm(x))
        return x


class SparseMLAForCausalLM(nn.Module):
    """The language model. Parameter names are those of the published checkpoints (`model.*`, `lm_head.weight`).

    forward(tokens int64 [T], batch, cache=None) -> fp32 logits [B, vocab_size] of each sequence's last token, or of
    all T tokens with all_tokens=True. The multi-token-prediction layer of the checkpoint is not part of it.
    """

    page_size = 64  # tokens, as the kernels of the byte layouts have them
    shares = Shares(rows=("lm_head",), blocks=False)
    ranks = ALONE

    def __init__(self, config: SparseMLAConfig, precision: Precision | None = None) -> None:
        super().__init__()
        self.config = config
        self.precision = precision or Precision.of(config)
        self.model = SparseMLAModel(config, self.precision)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype=self.precision.dtype)

    def forward(
        self,
        tokens: torch.Tensor,
        batch: TokenBatch,
        cache: PagedKVCache | None = None,
        *,
        all_tokens: bool = False,
    ) -> torch.Tensor:
        hidden = self.model(tokens, batch, cache)
        if not all_tokens and not batch.is_decode:  # where each token is the last
            hidden = hidden[batch.last_tokens]
        if torch.is_grad_enabled() or not hidden.is_cuda:
            logits = self.lm_head(hidden).float()
        else:
            logits = linear_fp32(hidden, self.lm_head.weight)  # not by way of 16 bits
        return self.ranks.join_columns(logits)

    def make_cache(
        self, num_pages: int, page_size: int = page_size, device: torch.device | str = "cpu", *, state_slots: int = 64
    ) -> PagedKVCache:
        """A paged cache with this model's dimensions and precision, for up to `state_slots` sequences at a time."""
        config, precision = self.config, self.precision
        return PagedKVCache(
            config.num_hidden_layers,
            num_pages,
            page_size,
            latent_dim=config.kv_lora_rank + config.qk_rope_head_dim,
            index_dim=config.index_head_dim,
            latent="fp8" if precision.kv_cache == "fp8" else precision.dtype,
            index="fp8" if precision.fp8_indexer else precision.dtype,
            index_layers=[i for i, kind in enumerate(config.indexer_types) if kind == "full"],
            state_slots=state_slots,
            device=device,
        )

    @property
    def captures_decode(self) -> bool:
        """Index keys in FP8 are scored where they are in the pages; others are gathered, as many as the host says."""
        return self.precision.fp8_indexer

    def init_buffers(self, device: torch.device | str) -> None:
        """Compute what no checkpoint stores, after construction on the meta device."""
        self.model.rotary = make_rotary(self.config.qk_rope_head_dim, self.config.rope).to(device)

    def name_of(self, stored: str) -> str:
        """The model's name of a checkpoint's tensor: the same."""
        return stored

    def skips(self, name: str) -> bool:
        """Whether a checkpoint tensor belongs to a multi-token-prediction layer, which generation does not use."""
        config = self.config
        mtp = range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers)
        return any(name.startswith(f"model.layers.{i}.") for i in mtp)
