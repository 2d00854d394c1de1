"""DeepSeek-V4: windows and compressed entries in one attention, hyper-connections, and hashed and routed experts."""

import re

import torch
from torch import nn

from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.compressed_kv_cache import CompressedKVCache
from dsa_layers.errors import CheckpointError
from dsa_layers.families.deepseek_v4.block import hyper_block
from dsa_layers.families.deepseek_v4.cache import compressed_cache
from dsa_layers.families.deepseek_v4.config import DeepseekV4Config
from dsa_layers.families.drafter import Drafter
from dsa_layers.families.precision import Precision
from dsa_layers.families.rotary import make_rotary
from dsa_layers.layers.hyper_connections import HyperHead
from dsa_layers.layers.linear import Embedding, LanguageModelHead
from dsa_layers.layers.norm import RMSNorm
from dsa_layers.layers.pass_checks import check_pass
from dsa_layers.layers.rope import JointRotary

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
    (r"^mtp\.0\.(?=(e_proj|h_proj|enorm|hnorm|norm|hc_head)[._])", "drafter."),
    (r"^mtp\.0\.", "drafter.block."),
    (r"\bhc_head(_|\.hc_)", "hc_head."),
    (r"\.hc_(attn|ffn)_", r".hc_\1."),
    (r"\.attn\.norm\.", ".attn.kv_norm."),
    (r"\.wo_a\.", ".wo_a.matrices."),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.w3\.", ".up_proj."),
    (r"(?<!\bhc_head)(?<!hc_attn)(?<!hc_ffn)\.scale$", ".weight_scale_inv"),
]

# The model's names -> the published ones, one after the other.
PUBLISHED_NAMES = [
    (r"^drafter\.(block\.)?", "mtp.0."),
    (r"\bhc_head\.", "hc_head_"),
    (r"\.hc_(attn|ffn)\.", r".hc_\1_"),
    (r"\.wo_a\.matrices\.", ".wo_a."),
    (r"\.gate_proj\.", ".w1."),
    (r"\.down_proj\.", ".w2."),
    (r"\.up_proj\.", ".w3."),
    (r"\.weight_scale_inv$", ".scale"),
]

# What the multi-token-prediction layer shares with the model, of which some checkpoints have copies.
COPIES = ("mtp.0.emb.", "mtp.0.embed.", "mtp.0.head.")

# Tensors by which a checkpoint is known to be of a variant that is not this model.
VARIANTS = [
    (r"^mtp\.\d+\.(main_proj|main_norm|markov_head|confidence_head)\.", "the DSpark drafter"),
    (r"\.engram\.|\.attn\.indexer\.(wk|k_norm)\.", "DeepSeek-V4.1"),
]


class DeepseekV4ForCausalLM(nn.Module):
    """The language model. Parameters have the published checkpoint's names, except for those that RENAMES changes.

    forward(tokens int64 [T], batch, cache=None) -> fp32 logits [B, vocab_size] of each sequence's last token, or of
    all T tokens with all_tokens=True: the `logits` of the pass's `states`.
    Raises TypeError or ValueError that names the argument; which tokens there are is not looked at.
    drafter: the checkpoint's multi-token-prediction layer, or None.
    """

    page_size = 256  # tokens: 64 entries of a layer with an indexer, 2 of the others

    def __init__(self, config: DeepseekV4Config, precision: Precision | None = None) -> None:
        super().__init__()
        self.config = config
        self.precision = precision or Precision.of(config)
        hidden, dtype = config.hidden_size, self.precision.dtype
        self.embed = Embedding(config.vocab_size, hidden, dtype=dtype)
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
        if not all_tokens and not batch.is_decode:  # where each token is the last
            streams = streams[batch.last_tokens]
        return self.logits(streams)

    def states(self, tokens: torch.Tensor, batch: TokenBatch, cache: CompressedKVCache | None = None) -> torch.Tensor:
        """[T, hc_mult, hidden_size]: the residual streams of all tokens, after the last layer."""
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
        """states [N, hc_mult, hidden_size], any rows -> fp32 [N, vocab_size]."""
        return self.head(self.norm(self.hc_head(states)))

    def _angle_kinds(self) -> list[tuple[str, int]]:
        """(embedding, ratio) of all angles that layers turn by: tokens' own, of ratio 1, and then entries'."""
        ratios = {self.config.compress_rates.get(kind) for kind in self.config.layer_types}
        of_entries = [("compress", ratio) for ratio in sorted(ratios - {None})]
        own = [("main", 1)] if None in ratios else []
        return [*own, *([("compress", 1)] if of_entries else []), *of_entries]

    def first_streams(self, tokens: torch.Tensor) -> torch.Tensor:
        """[T, hc_mult, hidden]: each stream begins with the tokens' embeddings."""
        return self.embed(tokens[:, None].expand(-1, self.config.hc_mult))

    def make_cache(
        self, num_pages: int, page_size: int = page_size, device: torch.device | str = "cpu", *, state_slots: int = 64
    ) -> CompressedKVCache:
        """A cache with this model's dimensions and precision, for so many sequences at a time."""
        attentions = [layer.attn for layer in self.layers]
        return compressed_cache(self.config, self.precision, attentions, num_pages, page_size, device, state_slots)

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
        kinds = self._angle_kinds()
        self.joint_rotary = JointRotary([(self.rotaries[kind], ratio) for kind, ratio in kinds])

    def skips(self, name: str) -> bool:
        """Whether a checkpoint tensor belongs to a multi-token-prediction layer, and no drafter reads it."""
        if not name.startswith("mtp.") or _variant(name) is not None:
            return False
        return self.drafter is None or not name.startswith("mtp.0.") or name.startswith(COPIES)

    def name_of(self, stored: str) -> str:
        """The model's name of a checkpoint's tensor. Raises CheckpointError for a tensor of a variant of the model that
        is not supported."""
        variant = _variant(stored)
        if variant is not None:
            raise CheckpointError(f"belongs to {variant}, which is not supported")
        for pattern, name in RENAMES:
            stored = re.sub(pattern, name, stored)
        return stored

    def stored_name(self, name: str, mtp_layer: int = 0) -> str:
        """The published name of a tensor of the model: the inverse of `name_of`. mtp_layer: the
        multi-token-prediction layer that the drafter's tensors are in."""
        for pattern, stored in PUBLISHED_NAMES:
            name = re.sub(pattern, stored, name)
        return re.sub(r"^mtp\.0\.", f"mtp.{mtp_layer}.", name)


def _variant(name: str) -> str | None:
    return next((variant for pattern, variant in VARIANTS if re.search(pattern, name)), None)
