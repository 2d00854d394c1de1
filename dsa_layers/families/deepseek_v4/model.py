"""DeepSeek-V4: windows and compressed entries in one attention, hyper-connections, and hashed and routed experts."""

import re

import torch
from torch import nn

from dsa_layers.batch.rows import Rows
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.compressed_kv_cache import CompressedKVCache, EntryShape
from dsa_layers.errors import CheckpointError
from dsa_layers.families.deepseek_v4.config import DeepseekV4Config
from dsa_layers.families.precision import Precision
from dsa_layers.families.rotary import make_rotary
from dsa_layers.layers.compressed_attention import CompressedAttention
from dsa_layers.layers.compressed_indexer import CompressedIndexer
from dsa_layers.layers.compressor import Compressor
from dsa_layers.layers.embedding import Embedding
from dsa_layers.layers.hyper_connections import HyperConnection, HyperHead
from dsa_layers.layers.hyper_decoder import HyperDecoderBlock
from dsa_layers.layers.linear import Linear, linear_fp32
from dsa_layers.layers.moe import MoE, SqrtSoftplusRouter
from dsa_layers.layers.norm import RMSNorm
from dsa_layers.layers.rope import RopeAngles
from dsa_layers.layers.shares import Shares
from dsa_layers.parallel.ranks import ALONE
from dsa_layers.parallel.rows import rows_of

INDEXED = "compressed_sparse_attention"

# Names in a checkpoint -> in the model, one after the other.
RENAMES = [
    # The names of transformers' modules -> the published ones. Its save_pretrained writes a mixture of both by default.
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.", r".hc_\1."),
    (r"\.sinks$", ".attn_sink"),
    (r"\.compressor\.indexer\.(q_b_proj\.|scorer\.)", r".indexer.\1"),
    (r"\.indexer\.scorer\.", ".indexer."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."),
    (r"\.position_bias$", ".ape"),
    (r"\.(q|o)_(a|b)_proj\.", r".w\1_\2."),
    (r"\.kv_proj\.", ".wkv."),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
    # The published names -> the model's.
    (r"^hc_head(_|\.hc_)", "hc_head."),
    (r"\.hc_(attn|ffn)_", r".hc_\1."),
    (r"\.attn\.norm\.", ".attn.kv_norm."),
    (r"\.wo_a\.", ".wo_a.matrices."),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.w3\.", ".up_proj."),
    (r"(?<!\bhc_head)(?<!hc_attn)(?<!hc_ffn)\.scale$", ".weight_scale_inv"),
]

# Tensors by which a checkpoint is known to be of a variant that is not this model.
VARIANTS = [
    (r"^mtp\.\d+\.(main_proj|main_norm|markov_head|confidence_head)\.", "the DSpark drafter"),
    (r"\.engram\.|\.attn\.indexer\.(wk|k_norm)\.", "DeepSeek-V4.1"),
]


def _block(config: DeepseekV4Config, precision: Precision, layer: int) -> HyperDecoderBlock:
    hidden, eps, dtype = config.hidden_size, config.rms_norm_eps, precision.dtype
    projections = precision.projections(config)
    ratio = config.compress_rates.get(config.layer_types[layer])
    compressor = indexer = None
    if ratio is not None:
        indexed = config.layer_types[layer] == INDEXED
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
        hash_tokens=config.vocab_size if config.hash_layers[layer] else None,
        scale=config.routed_scaling_factor,
        dtype=dtype,
    )
    experts = {"n_shared": config.n_shared_experts, "limit": config.swiglu_limit, "fp4_experts": precision.fp4_experts}
    ffn = MoE(hidden, config.moe_intermediate_size, router, **experts, **projections)
    streams = {"iterations": config.hc_sinkhorn_iters, "eps": eps, "hc_eps": config.hc_eps}
    hc_attn, hc_ffn = (HyperConnection(hidden, config.hc_mult, **streams) for _ in range(2))
    return HyperDecoderBlock(hidden, attention, ffn, hc_attn=hc_attn, hc_ffn=hc_ffn, eps=eps)


class DeepseekV4ForCausalLM(nn.Module):
    """The language model. Parameters have the published checkpoint's names, except for those that RENAMES changes.

    forward(tokens int64 [T], batch, cache=None) -> fp32 logits [B, vocab_size] of each sequence's last token, or of
    all T tokens with all_tokens=True. The multi-token-prediction layer of the checkpoint is not part of it.
    """

    page_size = 256  # tokens: 64 entries of a layer with an indexer, 2 of the others
    shares = Shares(rows=("head",), blocks=False)
    ranks = ALONE

    def __init__(self, config: DeepseekV4Config, precision: Precision | None = None) -> None:
        super().__init__()
        self.config = config
        self.precision = precision or Precision.of(config)
        hidden, dtype = config.hidden_size, self.precision.dtype
        self.embed = Embedding(config.vocab_size, hidden, dtype=dtype)
        self.layers = nn.ModuleList(_block(config, self.precision, i) for i in range(config.num_hidden_layers))
        self.hc_head = HyperHead(hidden, config.hc_mult, eps=config.rms_norm_eps, hc_eps=config.hc_eps)
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.head = Linear(hidden, config.vocab_size, dtype=dtype)
        self.init_buffers(self.head.weight.device)

    def forward(
        self,
        tokens: torch.Tensor,
        batch: TokenBatch,
        cache: CompressedKVCache | None = None,
        *,
        all_tokens: bool = False,
    ) -> torch.Tensor:
        # Angles are computed when the first layer asks for them: the GPU is busy with the layers before by then.
        angles: dict[tuple[str, int | None], RopeAngles] = {}

        def rope_of(kind: str, ratio: int | None = None) -> RopeAngles:
            """Of the tokens, or of the entries that they may end."""
            if (kind, ratio) not in angles:
                positions = batch.positions if ratio is None else batch.entries(ratio).positions
                angles[kind, ratio] = RopeAngles(self.rotaries[kind](positions))
            return angles[kind, ratio]

        rows = rows_of(batch, self.ranks)
        streams = self._streams(tokens, rows)
        for i, layer in enumerate(self.layers):
            ratio = self.config.compress_rates.get(self.config.layer_types[i])
            rope = rope_of("main" if ratio is None else "compress")
            entry_rope = None if ratio is None else rope_of("compress", ratio)
            streams = layer(streams, tokens, rope, entry_rope, batch, None if cache is None else cache.layer(i), rows)
        few = not all_tokens and not batch.is_decode  # where each token is the last
        if rows.shared:
            (x,) = rows.gather(self.hc_head(streams))
            x = x[batch.last_tokens] if few else x
        else:
            x = self.hc_head(streams[batch.last_tokens] if few else streams)
        return self.ranks.join_columns(linear_fp32(self.norm(x), self.head.weight))

    def _streams(self, tokens: torch.Tensor, rows: Rows) -> torch.Tensor:
        """[T, hc_mult, hidden]: each of them begins with the tokens' embeddings."""
        if rows.parts:
            return rows.sum(self.embed(tokens))[:, None].expand(-1, self.config.hc_mult, -1).contiguous()
        return self.embed(tokens[:, None].expand(-1, self.config.hc_mult))

    def make_cache(
        self, num_pages: int, page_size: int = page_size, device: torch.device | str = "cpu", *, state_slots: int = 64
    ) -> CompressedKVCache:
        """A cache with this model's dimensions and precision, for so many sequences at a time."""
        precision = self.precision

        def shape(compressor: Compressor | None) -> EntryShape | None:
            return compressor and EntryShape(compressor.ratio, compressor.dim, compressor.state_shape)

        attentions = [layer.attn for layer in self.layers]
        return CompressedKVCache(
            [(shape(a.compressor), shape(a.indexer and a.indexer.compressor)) for a in attentions],
            num_pages,
            page_size,
            state_slots,
            window=self.config.sliding_window,
            dim=self.config.head_dim,
            entries="fp8" if precision.kv_cache == "fp8" else precision.dtype,
            index="fp8" if precision.fp8_indexer else precision.dtype,
            device=device,
        )

    @property
    def captures_decode(self) -> bool:
        """Index keys in FP8 are scored where they are in the pages; others are gathered, as many as the host says."""
        return self.precision.fp8_indexer

    def init_buffers(self, device: torch.device | str) -> None:
        """Compute what no checkpoint stores, after construction on the meta device."""
        config = self.config
        ropes = {"main": config.rope, "compress": config.compress_rope}
        rotaries = {kind: make_rotary(config.qk_rope_head_dim, rope) for kind, rope in ropes.items()}
        self.rotaries = nn.ModuleDict(rotaries).to(device)

    def skips(self, name: str) -> bool:
        """Whether a checkpoint tensor belongs to a multi-token-prediction layer, which generation does not use."""
        return name.startswith("mtp.") and _variant(name) is None

    def name_of(self, stored: str) -> str:
        """The model's name of a checkpoint's tensor. Raises CheckpointError for a tensor of a variant of the model that
        is not supported."""
        variant = _variant(stored)
        if variant is not None:
            raise CheckpointError(f"belongs to {variant}, which is not supported")
        for pattern, name in RENAMES:
            stored = re.sub(pattern, name, stored)
        return stored


def _variant(name: str) -> str | None:
    return next((variant for pattern, variant in VARIANTS if re.search(pattern, name)), None)
