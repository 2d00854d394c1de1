"""The model of the families with latent attention, lightning-indexer selection and mixture-of-experts MLPs."""

import torch
from torch import nn

from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.kv_cache import PagedKVCache
from dsa_layers.families.drafter import Drafter
from dsa_layers.families.pass_arguments import check_pass
from dsa_layers.families.precision import Precision
from dsa_layers.families.rotary import make_rotary
from dsa_layers.families.sparse_mla.block import decoder_block
from dsa_layers.families.sparse_mla.cache import paged_cache
from dsa_layers.families.sparse_mla.config import SparseMLAConfig
from dsa_layers.families.sparse_mla.mtp_names import drafter_name, is_read, mtp_part, stored_name
from dsa_layers.layers.embedding import Embedding
from dsa_layers.layers.lm_head import LanguageModelHead
from dsa_layers.layers.norm import RMSNorm


class SparseMLAModel(nn.Module):
    """Embedding, decoder blocks, final norm: tokens int64 [T] -> hidden states [T, hidden_size].

    What a layer with an indexer selects is handed on to the layers after it that have none, within a pass.
    """

    def __init__(self, config: SparseMLAConfig, precision: Precision) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=precision.dtype)
        self.layers = nn.ModuleList(
            decoder_block(config, precision, indexed=kind == "full", dense=i < config.first_k_dense_replace)
            for i, kind in enumerate(config.indexer_types)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = make_rotary(config.qk_rope_head_dim, config.rope)

    def forward(self, tokens: torch.Tensor, batch: TokenBatch, cache: PagedKVCache | None = None) -> torch.Tensor:
        check_pass(tokens, batch, cache)
        cos, sin = self.rotary(batch.positions)
        x, selected = self.embed_tokens(tokens), None
        for i, layer in enumerate(self.layers):
            x, selected = layer(x, cos, sin, batch, None if cache is None else cache.layer(i), selected)
        return self.norm(x)


class SparseMLAForCausalLM(nn.Module):
    """The language model. Parameter names are those of the published checkpoints (`model.*`, `lm_head.weight`).

    forward(tokens int64 [T], batch, cache=None) -> fp32 logits [B, vocab_size] of each sequence's last token, or of
    all T tokens with all_tokens=True: the `logits` of the pass's `states`.
    Raises TypeError or ValueError that names the argument; which tokens there are is not looked at.
    drafter: the checkpoint's multi-token-prediction layer, or None.
    """

    page_size = 64  # tokens, as the kernels of the byte layouts have them
    def __init__(self, config: SparseMLAConfig, precision: Precision | None = None) -> None:
        super().__init__()
        self.config = config
        self.precision = precision or Precision.of(config)
        self.model = SparseMLAModel(config, self.precision)
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
        if not all_tokens and not batch.is_decode:  # where each token is the last
            hidden = hidden[batch.last_tokens]
        return self.logits(hidden)

    def states(self, tokens: torch.Tensor, batch: TokenBatch, cache: PagedKVCache | None = None) -> torch.Tensor:
        """[T, hidden_size]: the hidden states of all tokens, after the final norm."""
        return self.model(tokens, batch, cache)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """states [N, hidden_size], any rows -> fp32 [N, vocab_size], which no 16 bits have rounded."""
        return self.lm_head(states)

    def make_cache(
        self, num_pages: int, page_size: int = page_size, device: torch.device | str = "cpu", *, state_slots: int = 64
    ) -> PagedKVCache:
        """A paged cache with this model's dimensions and precision, for up to `state_slots` sequences at a time."""
        indexed = [kind == "full" for kind in self.config.indexer_types]
        return paged_cache(self.config, self.precision, indexed, num_pages, page_size, device, state_slots)

    @property
    def captures_decode(self) -> bool:
        """Index keys in FP8 are scored where they are in the pages; others are gathered, as many as the host says."""
        return self.precision.fp8_indexer

    def init_buffers(self, device: torch.device | str) -> None:
        """Compute what no checkpoint stores, after construction on the meta device."""
        self.model.rotary = make_rotary(self.config.qk_rope_head_dim, self.config.rope).to(device)

    def name_of(self, stored: str) -> str:
        """The model's name of a checkpoint's tensor: the same, but in the first multi-token-prediction layer."""
        part = mtp_part(self.config, stored)
        return drafter_name(part[1]) if part is not None and part[0] == 0 else stored

    def stored_name(self, name: str, mtp_layer: int = 0) -> str:
        """The checkpoint's name of a tensor of the model: the inverse of `name_of`. mtp_layer: the
        multi-token-prediction layer that the drafter's tensors are in."""
        return stored_name(self.config, name, mtp_layer)

    def skips(self, name: str) -> bool:
        """Whether a checkpoint tensor belongs to a multi-token-prediction layer, and no drafter reads it."""
        part = mtp_part(self.config, name)
        return part is not None and (self.drafter is None or not is_read(*part))
