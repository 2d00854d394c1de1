"""`KimiDeltaAttention` for inference, with states per sequence, on one or several ranks."""

from collections.abc import Sequence
from typing import Any

import torch

import dsa
from dsa_layers.batch.token_batch import TokenBatch, check_tokens
from dsa_layers.batch.views import StateView
from dsa_layers.cache.delta_kv_cache import DeltaCache
from dsa_layers.cache.drafts import DRAFTS
from dsa_layers.engine import delta_kernels, joint_linear
from dsa_layers.engine.joint_linear import Cast
from dsa_layers.engine.layer_pass import check_inference
from dsa_layers.layers.kimi_delta_attention import DeltaInputs, KimiDeltaAttention
from dsa_layers.layers.linear import HALVES
from dsa_layers.parallel.placement import placement_of
from dsa_layers.parallel.ranks import ALONE, Ranks


class PagedDeltaAttention(KimiDeltaAttention):
    """`KimiDeltaAttention` for inference.

    forward(x, cos, sin, batch, cache=None, selected=None, cast=None) -> ([T, hidden], selected), without gradients.

    batch  the new tokens of all ranks. Without a cache, no sequence may have earlier tokens
    cast   x in FP8 with scales (`norm_and_cast`), for the layers in `joint_layers`; None if the caller has none
    ranks  the ranks that compute the layer. A rank computes its heads for all rows, and the ranks sum the results. x
           and the result have this rank's local rows (`placement_of`)
    """

    ranks: Ranks = ALONE

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: TokenBatch,
        cache: DeltaCache | None = None,
        selected: Any = None,
        *,
        cast: Cast | None = None,
    ) -> tuple[torch.Tensor, Any]:
        self.check_pass(x, batch)
        check_inference(x, batch, cache, DeltaCache)
        with torch.no_grad():
            placement = placement_of(batch, self.ranks)
            check_tokens(x, placement.local_cached(batch.positions))
            if placement.sharded:
                (x,), cast = placement.all_gather(x), None
            inputs = self._project(x, cast)
            out = self._without_cache(inputs, batch) if cache is None else self._with_states(inputs, batch, cache)
            return placement.reduce(self._output(out, inputs.gate, x.dtype)), selected

    def _project(self, x: torch.Tensor, cast: Cast | None = None) -> DeltaInputs:
        q, k, v, f, g = joint_linear.multiply(x, *self.joint_layers(), cast=cast)
        return self._gates(x, torch.cat((q, k, v), -1), f, g)

    def _with_states(self, inputs: DeltaInputs, batch: TokenBatch, cache: DeltaCache) -> torch.Tensor:
        """Return o [T, heads, dim]. Write the convolution's inputs and the new states to the cache."""
        view = batch.states(cache.states.shape[1])
        windows = batch.windows(self.conv_width, cache.inputs.shape[1])
        before = dsa.read_kv_cache(cache.inputs, windows.before_slots, dtype=inputs.mixed.dtype)
        dsa.write_kv_cache(inputs.mixed, cache.inputs, windows.slots)
        qkv = self._convolve(inputs, before, batch.query_lens)
        states = cache.states.flatten(0, 1)
        state = states[view.before].masked_fill_(view.is_new[:, None, None, None], 0)
        if batch.is_decode and batch.next_n > 1:
            return self._token_by_token(qkv, inputs, state, states, view)
        out, states[view.after[0]] = self._recur(qkv, inputs, batch.query_lens, state)
        return out

    def _convolve(self, inputs: DeltaInputs, before: torch.Tensor, lens: Sequence[int]) -> torch.Tensor:
        # The kernel's launcher reads cu_seqlens on the host, so a CUDA graph cannot capture the kernel. Decoding
        # passes, which may be captured, have at most DRAFTS + 1 tokens per sequence, so they do not use the kernel.
        prefills = max(lens, default=0) > DRAFTS + 1
        if prefills and self._has_kernels(inputs.mixed):
            made = delta_kernels.convolve(inputs.mixed, before, self.conv_weight(), lens)
            return made.unflatten(-1, (3, self.n_heads, self.dim))
        return super()._convolve(inputs, before, lens)

    def _recur(
        self, qkv: torch.Tensor, inputs: DeltaInputs, lens: Sequence[int], states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._has_kernels(qkv):
            return delta_kernels.delta_rule(qkv, inputs.decay, inputs.beta, lens, states, self.lower_bound)
        return super()._recur(qkv, inputs, lens, states)

    def _has_kernels(self, x: torch.Tensor) -> bool:
        return x.is_cuda and x.dtype in HALVES and delta_kernels.installed()

    def _token_by_token(
        self, qkv: torch.Tensor, inputs: DeltaInputs, state: torch.Tensor, states: torch.Tensor, view: StateView
    ) -> torch.Tensor:
        """Return o of a decoding pass. Write the state after each token to the cache, because a sequence may continue
        after any of these tokens. state [B, ...]: the states before the pass. states: all rows of the cache."""
        out, tokens = [], len(view.after)
        for i, rows in enumerate(view.after):
            of_token = DeltaInputs(*(x[i::tokens] for x in inputs))
            made, state = self._recur(qkv[i::tokens], of_token, (1,) * len(state), state)
            states[rows] = state
            out.append(made)
        return torch.stack(out, 1).flatten(0, 1)
