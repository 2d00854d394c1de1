"""DeepSeek-V4's multi-token-prediction layer: it guesses a token further ahead."""

import torch
from torch import nn

from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.compressed_kv_cache import CompressedKVCache
from dsa_layers.families.deepseek_v4.block import hyper_block
from dsa_layers.families.deepseek_v4.cache import compressed_cache
from dsa_layers.families.deepseek_v4.model import DeepseekV4ForCausalLM
from dsa_layers.families.drafter import check_states
from dsa_layers.layers.hyper_connections import HyperHead
from dsa_layers.layers.linear import make_linear
from dsa_layers.layers.norm import RMSNorm
from dsa_layers.layers.pass_checks import check_pass
from dsa_layers.layers.rope import RopeAngles


class DeepseekV4Drafter(nn.Module):
    """Y[t] = block(e_proj(enorm(embed(token t + 1))) + h_proj(hnorm(X[t]))), the former for each of the streams X: see
    `Drafter`. logits = head(norm(hc_head(Y))).

    states [T, hc_mult, hidden_size]: the target's streams, or Y of an earlier step. The block attends to the window
    alone, and its experts follow from a router.
    Embedding, angles and the head's matrix are the target's. Parameters: e_proj, h_proj [hidden, hidden], FP8 with
    scales if the target's are; enorm, hnorm, norm [hidden]; hc_head; and block.
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
        self._target = (target,)  # which is no submodule

    def forward(
        self, tokens: torch.Tensor, states: torch.Tensor, batch: TokenBatch, cache: CompressedKVCache | None = None
    ) -> torch.Tensor:
        check_pass(tokens, batch, cache)
        (target,) = self._target
        check_states(states, tokens, target.config.hc_mult, target.config.hidden_size)
        rope = RopeAngles(target.rotaries["main"](batch.positions))
        # As in training the first position has an embedding, too. (vLLM zeroes it.)
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
        layers = [self.block.attn]
        return compressed_cache(target.config, target.precision, layers, num_pages, page_size, device, state_slots)
