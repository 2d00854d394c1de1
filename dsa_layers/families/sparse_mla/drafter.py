"""The multi-token-prediction layer of the families with latent attention: it guesses a token further ahead."""

import torch
from torch import nn

from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.kv_cache import PagedKVCache
from dsa_layers.families.drafter import check_states
from dsa_layers.families.sparse_mla.block import decoder_block
from dsa_layers.families.sparse_mla.cache import paged_cache
from dsa_layers.families.sparse_mla.model import SparseMLAForCausalLM
from dsa_layers.layers.linear import Linear
from dsa_layers.layers.norm import RMSNorm
from dsa_layers.parallel.ranks import ALONE
from dsa_layers.parallel.rows import rows_of


class SparseMLADrafter(nn.Module):
    """y[t] = norm(block(eh_proj([enorm(embed(token t + 1)) | hnorm(h[t])]))), h the states: see `Drafter`.

    states [T, hidden_size]: the target's, after its final norm, or y of an earlier step. The block has experts and an
    indexer of its own, which selects in every step; in GLM-5.2 (`index_share_for_mtp_iteration`) engines give further
    steps the keys of the first one.
    Embedding, angles and head are the target's. Parameters: enorm, hnorm, norm [hidden], eh_proj [hidden, 2 hidden],
    which is never quantised, and block.
    Source: DeepSeek-V3's report (arXiv 2412.19437), section 2.2.
    """

    page_size = SparseMLAForCausalLM.page_size
    ranks = ALONE

    def __init__(self, target: SparseMLAForCausalLM) -> None:
        super().__init__()
        config, precision = target.config, target.precision
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.eh_proj = Linear(2 * hidden, hidden, dtype=precision.dtype)
        self.block = decoder_block(config, precision, indexed=True, dense=False)
        self.norm = RMSNorm(hidden, eps)
        self._target = (target,)  # which is no submodule

    def forward(
        self, tokens: torch.Tensor, states: torch.Tensor, batch: TokenBatch, cache: PagedKVCache | None = None
    ) -> torch.Tensor:
        (target,) = self._target
        check_states(states, tokens, target.config.hidden_size)
        cos, sin = target.model.rotary(batch.positions)
        rows = rows_of(batch, self.ranks)
        # Training shifts the tokens by one, so that the first position has an embedding, too. (vLLM zeroes it.)
        e = self.enorm(rows.sum(target.model.embed_tokens(tokens)))
        x = self.eh_proj(torch.cat((e, self.hnorm(rows.own(states))), -1))
        x = self.block(x, cos, sin, batch, None if cache is None else cache.layer(0), rows=rows)
        (x,) = rows.gather(self.norm(x))
        return x

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self._target[0].logits(states)

    def make_cache(
        self, num_pages: int, page_size: int = page_size, device: torch.device | str = "cpu", *, state_slots: int = 64
    ) -> PagedKVCache:
        (target,) = self._target
        return paged_cache(target.config, target.precision, [True], num_pages, page_size, device, state_slots)
