"""The multi-token-prediction layer of the families with latent attention: it guesses a token further ahead."""

import torch
from torch import nn

from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.kv_cache import PagedKVCache
from dsa_layers.engine.selected import Selected
from dsa_layers.families.drafter import check_states
from dsa_layers.families.pass_arguments import check_pass
from dsa_layers.families.sparse_mla.block import decoder_block
from dsa_layers.families.sparse_mla.cache import paged_cache
from dsa_layers.families.sparse_mla.drafted_states import DraftedStates, Slots, slots_of, without_indexer
from dsa_layers.families.sparse_mla.model import SparseMLAForCausalLM
from dsa_layers.layers.linear import Linear
from dsa_layers.layers.norm import RMSNorm
from dsa_layers.layers.trained_attention import SharedTokens


class SparseMLADrafter(nn.Module):
    """y[t] = norm(block(eh_proj([enorm(embed(token t + 1)) | hnorm(h[t])]))), h the states: see `Drafter`.

    states [T, hidden_size]: the target's, after its final norm, or y of an earlier step. The block has experts and an
    indexer of its own, with which it selects in every step. Or, with `index_share_for_mtp_iteration` (GLM-5.2), in the
    first one alone: a further step attends to S[t], the keys that the first step attended to at the last position t
    of which the target's states were known, whatever position it is at itself. Its own key is not among them, and its
    indexer does not run. Steps then give `DraftedStates`, by which a further one is known; it takes one token of each
    sequence, over the cache of the first.
    Embedding, angles and head are the target's. Parameters: enorm, hnorm, norm [hidden], eh_proj [hidden, 2 hidden],
    which is never quantised, and block.
    Source: DeepSeek-V3's report (arXiv 2412.19437), section 2.2. Shared keys: Z.ai's account of GLM-5.2, and vLLM's,
    SGLang's and TensorRT-LLM's code for it.
    """

    page_size = SparseMLAForCausalLM.page_size
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
        self,
        tokens: torch.Tensor,
        states: torch.Tensor | DraftedStates,
        batch: TokenBatch,
        cache: PagedKVCache | None = None,
    ) -> torch.Tensor | DraftedStates:
        check_pass(tokens, batch, cache)
        (target,) = self._target
        config = target.config
        block, selected, slots, h = self.block, None, None, states
        if isinstance(states, DraftedStates):
            slots, h = self._first_slots(states, batch, cache), states.values
            block = without_indexer(self.block)
            selected = Selected(slots(slice(None)), batch, "slots")
        check_states(h, tokens, config.hidden_size)
        if cache is None and isinstance(batch, SharedTokens) and self.block.self_attn.indexer_stage is None:
            raise ValueError(
                "batch: a rank's share of tokens is for a drafter in its stage: IndexerStage(.., drafter=True)"
            )
        cos, sin = target.model.rotary(batch.positions)
        # Training shifts the tokens by one, so that the first position has an embedding, too. (vLLM zeroes it.)
        e = self.enorm(target.model.embed_tokens(tokens))
        x = self.eh_proj(torch.cat((e, self.hnorm(h)), -1))
        layer_cache = None if cache is None else cache.layer(0)
        x, selected = block(x, cos, sin, batch, layer_cache, selected)
        x = self.norm(x)
        if not config.index_share_for_mtp_iteration:
            return x
        return DraftedStates(x, slots or slots_of(selected, batch, layer_cache, config.index_topk))

    @staticmethod
    def _first_slots(states: DraftedStates, batch: TokenBatch, cache: PagedKVCache | None) -> Slots:
        if states.slots is None or cache is None:
            without = "the step that gave states" if states.slots is None else "this one"
            raise ValueError(
                "cache: must be the first step's, in which a further one reads the keys that it selected "
                f"(index_share_for_mtp_iteration), got none in {without}"
            )
        if not batch.is_decode:
            raise ValueError(
                "batch: a further step takes one token of each sequence (index_share_for_mtp_iteration), got "
                f"{list(batch.query_lens)}"
            )
        return states.slots

    def logits(self, states: torch.Tensor | DraftedStates) -> torch.Tensor:
        return self._target[0].logits(states.values if isinstance(states, DraftedStates) else states)

    def make_cache(
        self, num_pages: int, page_size: int = page_size, device: torch.device | str = "cpu", *, state_slots: int = 64
    ) -> PagedKVCache:
        (target,) = self._target
        return paged_cache(target.config, target.precision, [True], num_pages, page_size, device, state_slots)
