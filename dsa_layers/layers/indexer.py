"""The protocol of indexers, and the lightning indexer. An indexer selects the keys that each token attends to."""

from typing import Literal, Protocol

import torch

import dsa
from dsa.runtime.checks import check_choice, check_flag, integer
from dsa_layers.batch.token_batch import TokenBatch, check_no_cache
from dsa_layers.cache.kv_cache import LayerCache
from dsa_layers.layers.key_selection import SCORE_ACCUMULATORS, WORKSPACE, KeySelection
from dsa_layers.layers.linear import Linear, make_linear
from dsa_layers.layers.norm import LayerNorm
from dsa_layers.layers.position_scaling import PositionScaling
from dsa_layers.layers.rope import Angles
from dsa_layers.layers.trained_attention import TrainedAttention


class Indexer(Protocol):
    """The interface of an indexer for `DSAAttention`: a torch.nn.Module with top_k and `select`. `store` is needed only
    with a cache, and `loss` only in training (`dsa_layers.IndexerStage`).

    top_k  number of keys that a token attends to; a token that sees fewer keys attends to all of them
    x      [T, hidden]: the hidden states of the new tokens
    qr     [T, q_lora_rank]: the query latents of the new tokens
    rope   (cos, sin), fp32 [T, rope_dim / 2], at the positions of the new tokens
    """

    top_k: int

    def select(
        self, x: torch.Tensor, qr: torch.Tensor, rope: Angles, batch: TokenBatch, cache: LayerCache | None = None
    ) -> torch.Tensor:
        """Return int32 [T, top_k]: the selected positions in each token's sequence, ascending. If a token sees n <
        top_k keys, the first n columns have all n positions, and the other columns are -1.

        Without a cache, the packed keys are computed from the rows of x. With a cache, the caller has called `store`,
        and the packed keys are the cache rows at `batch.key_slots`. Token t sees `batch.visible_keys[t]` packed keys,
        beginning at row `batch.key_starts[t]`.
        """

    def store(self, x: torch.Tensor, rope: Angles, batch: TokenBatch, cache: LayerCache) -> None:
        """Write the new tokens' data, such as index keys, to `cache.index` at `batch.slots`. `PagedAttention` calls
        `store` before `select`, and also in a pass that attends to all keys without `select`."""

    def loss(self, x: torch.Tensor, qr: torch.Tensor, rope: Angles, attention: TrainedAttention) -> torch.Tensor:
        """Return fp32 [T]: the loss of each token, from a call of `attention.kl` or `attention.lightning_kl`. x and qr
        are detached."""


class LightningIndexer(KeySelection):
    """I[t, s] = sum_h w[t, h] relu(q[t, h] . k[s]). Token t attends to the `top_k` keys s <= t with the largest I.

    q = wq_b(qr) per head, with rope on the first or last channels
    k = LayerNorm(wk(x)) with rope on the same channels; all heads share this key
    w = weights_proj(x) * n_heads^-0.5 * head_dim^-0.5, in fp32
    With `norm_queries`, q = wq_b(LayerNorm(qr)). With `position_scaling`, q is then scaled (`PositionScaling`).

    If `quantize`, q and k are Hadamard-transformed and cast to e4m3 for `select`, which then requires head_dim 128.
    Each head of a query and each key has one power-of-two scale; the scales of the queries are multiplied into w.
    rope_interleaved, rope_dims: `interleaved` and `dims` of `dsa.apply_rotary`. eps: of the LayerNorms. fp8, dtype,
    use_ue8m0: of wq_b and wk, see `make_linear`. top_k, workspace, accumulators: see `KeySelection`.

    `select` and `loss` implement the protocol `Indexer`. `loss` never quantises, and `select` has no gradient. The
    constructor raises TypeError or ValueError, which names the argument, for invalid sizes, flags and dtypes.
    Parameters: wq_b [n_heads * head_dim, q_lora_rank], wk [head_dim, hidden], k_norm.{weight,bias} [head_dim],
    weights_proj [n_heads, hidden]; optional: q_input_norm.{weight,bias} [q_lora_rank], softmax_scaling.{scale,bias}
    [n_heads].
    Source: `Indexer` of DeepSeek-V3.2's inference code; arXiv 2512.02556, section 2.1.
    """

    def __init__(
        self,
        hidden: int,
        q_lora_rank: int,
        *,
        n_heads: int = 64,
        head_dim: int = 128,
        top_k: int = 2048,
        rope_interleaved: bool = False,
        rope_dims: Literal["first", "last"] = "first",
        eps: float = 1e-6,
        norm_queries: bool = False,
        position_scaling: bool = False,
        quantize: bool = True,
        fp8: bool = False,
        dtype: torch.dtype | None = None,
        use_ue8m0: bool = True,
        workspace: int = WORKSPACE,
        accumulators: torch.dtype = SCORE_ACCUMULATORS,
    ) -> None:
        super().__init__(top_k, workspace, accumulators)
        sizes = {"hidden": hidden, "q_lora_rank": q_lora_rank, "n_heads": n_heads, "head_dim": head_dim}
        for name, size in sizes.items():
            integer(name, size, at_least=1)
        check_flag("rope_interleaved", rope_interleaved)
        check_choice("rope_dims", rope_dims, ("first", "last"))
        for name, flag in (
            ("norm_queries", norm_queries),
            ("position_scaling", position_scaling),
            ("quantize", quantize),
        ):
            check_flag(name, flag)
        self.n_heads, self.head_dim = n_heads, head_dim
        self.rope = {"interleaved": rope_interleaved, "dims": rope_dims}
        self.quantize = quantize
        self.wq_b = make_linear(q_lora_rank, n_heads * head_dim, fp8=fp8, dtype=dtype, use_ue8m0=use_ue8m0)
        self.wk = make_linear(hidden, head_dim, fp8=fp8, dtype=dtype, use_ue8m0=use_ue8m0)
        self.k_norm = LayerNorm(head_dim, eps)
        self.weights_proj = Linear(hidden, n_heads, dtype=dtype)
        self.q_input_norm = LayerNorm(q_lora_rank, eps) if norm_queries else None
        self.softmax_scaling = PositionScaling(n_heads) if position_scaling else None

    def project(
        self, x: torch.Tensor, qr: torch.Tensor, rope: Angles, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (q [T, n_heads, head_dim], k [T, head_dim], w fp32 [T, n_heads]), not quantised, with gradients.
        positions: int64 [T], needed with `position_scaling`."""
        q = self.queries(qr, positions).unflatten(-1, (self.n_heads, self.head_dim))
        return dsa.apply_rotary(q, *rope, **self.rope), self.keys(self.wk(x), rope), self.head_weights(x)

    def queries(self, qr: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Return the index queries [T, n_heads * head_dim] before rope. positions: see `project`."""
        q = self.wq_b(qr if self.q_input_norm is None else self.q_input_norm(qr))
        return self.scaled(q, positions)

    def scaled(self, q: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Apply `position_scaling`, if the indexer has it, to q [T, n_heads * head_dim]."""
        if self.softmax_scaling is None:
            return q
        return self.softmax_scaling(q.unflatten(-1, (self.n_heads, self.head_dim)), positions).flatten(-2)

    def loss(self, x: torch.Tensor, qr: torch.Tensor, rope: Angles, attention: TrainedAttention) -> torch.Tensor:
        return attention.lightning_kl(*self.project(x, qr, rope, attention.positions))

    @torch.no_grad()
    def select(
        self, x: torch.Tensor, qr: torch.Tensor, rope: Angles, batch: TokenBatch, cache: LayerCache | None = None
    ) -> torch.Tensor:
        check_no_cache(cache, batch)
        keys = self.keys(self.wk(x), rope)
        return self.select_new(
            self.queries(qr, batch.positions), keys, self.head_weights(x), rope, batch, batch.is_decode
        )

    def keys(self, projected: torch.Tensor, rope: Angles) -> torch.Tensor:
        """Return k [T, head_dim], not quantised. projected: wk(x)."""
        return dsa.apply_rotary(self.k_norm(projected), *rope, **self.rope)
