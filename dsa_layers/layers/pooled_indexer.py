"""GLM-5.3's lightning indexer, which selects pools of consecutive tokens."""

from typing import Any, ClassVar

import torch
from torch import nn

from dsa.runtime.checks import integer
from dsa_layers.batch import packing
from dsa_layers.batch.token_batch import TokenBatch, check_no_cache
from dsa_layers.batch.views import EntryView
from dsa_layers.cache.kv_cache import LayerCache
from dsa_layers.layers.key_selection import SCORE_ACCUMULATORS, WORKSPACE, KeySelection
from dsa_layers.layers.linear import Linear, make_linear
from dsa_layers.layers.norm import LayerNorm
from dsa_layers.layers.rope import Angles


class PooledIndexer(KeySelection):
    """I[t, p] = sum_h w[t, h] relu(q[t, h] . K[p]). Token t attends to the top_k / pool pools p with the largest I
    among the complete pools, whose last token is t or earlier, and to the tokens after the last complete pool up to t.

    Pool p contains the tokens pool * p to pool * p + pool - 1 of a sequence.
    q = wq_b(qr) per head
    K[p] = sum_j softmax_j(z_j + ape_j) k_j per channel, over the tokens j of pool p
    k = LayerNorm(wk(x)), z = gate x; w = weights_proj(x) * n_heads^-0.5 * head_dim^-0.5, in fp32

    The indexer has no rope. `select` rotates q, but not k, by the argument `rope`, so all angles in `rope` must be 0.
    quantize: as in `LightningIndexer`, for q and K. fp8, dtype, use_ue8m0: of wq_b and wk, see `make_linear`. top_k: a
    multiple of pool. workspace, accumulators: see `KeySelection`.
    `select` implements the protocol `Indexer`, except that the result is int32 [T, top_k + pool - 1]. The result has
    no gradient, and there is no `loss`.
    Parameters: wq_b [n_heads * head_dim, q_lora_rank], wk [head_dim, hidden], k_norm.{weight,bias} [head_dim],
    weights_proj [n_heads, hidden], index_kpool_compress_ape (ape) fp32 [pool, head_dim], index_kpool_compress_gate
    (gate) [head_dim, hidden].
    The constructor raises TypeError or ValueError, which names the argument, for invalid sizes.
    Source: `Glm5NextTextIndexer` of transformers 5.
    """

    rope: ClassVar[dict[str, Any]] = {"interleaved": True, "dims": "first"}

    def __init__(
        self,
        hidden: int,
        q_lora_rank: int,
        *,
        n_heads: int = 32,
        head_dim: int = 128,
        top_k: int = 2048,
        pool: int = 4,
        quantize: bool = True,
        fp8: bool = False,
        dtype: torch.dtype | None = None,
        use_ue8m0: bool = True,
        workspace: int = WORKSPACE,
        accumulators: torch.dtype = SCORE_ACCUMULATORS,
    ) -> None:
        super().__init__(top_k, workspace, accumulators)
        sizes = {"hidden": hidden, "q_lora_rank": q_lora_rank, "n_heads": n_heads, "head_dim": head_dim, "pool": pool}
        for name, size in sizes.items():
            integer(name, size, at_least=1)
        if top_k % pool:
            raise ValueError(f"top_k: must be a multiple of pool={pool}, got {top_k}")
        self.n_heads, self.head_dim, self.pool, self.quantize = n_heads, head_dim, pool, quantize
        self.wq_b = make_linear(q_lora_rank, n_heads * head_dim, fp8=fp8, dtype=dtype, use_ue8m0=use_ue8m0)
        self.wk = make_linear(hidden, head_dim, fp8=fp8, dtype=dtype, use_ue8m0=use_ue8m0)
        self.k_norm = LayerNorm(head_dim)
        self.weights_proj = Linear(hidden, n_heads, dtype=dtype)
        self.index_kpool_compress_ape = nn.Parameter(torch.zeros(pool, head_dim, dtype=torch.float32))
        self.index_kpool_compress_gate = nn.Parameter(torch.zeros(head_dim, hidden, dtype=dtype))

    @property
    def selects(self) -> int:
        return self.top_k // self.pool

    @torch.no_grad()
    def select(
        self, x: torch.Tensor, qr: torch.Tensor, rope: Angles, batch: TokenBatch, cache: LayerCache | None = None
    ) -> torch.Tensor:
        check_no_cache(cache, batch)
        entries = self.selectable(batch)
        keys = self.packed_keys(self.pooled_inputs(x), batch).to(x.dtype)
        pools = self.select_new(self.wq_b(qr), keys, self.head_weights(x), rope, entries, batch.is_decode)
        return tokens_of_pools(pools, batch.visible_keys, self.pool)

    def selectable(self, batch: TokenBatch) -> EntryView:
        """Return the view of the pools, the keys that the indexer selects from."""
        return batch.entries(self.pool)

    def pooled_inputs(self, x: torch.Tensor) -> torch.Tensor:
        """Return k and z of each token, [T, 2 * head_dim]."""
        return torch.cat((self.k_norm(self.wk(x)), nn.functional.linear(x, self.index_kpool_compress_gate)), -1)

    def packed_keys(self, inputs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """Return K of every complete pool, fp32 [N, head_dim]. The batch must have no earlier tokens. inputs: the
        result of `pooled_inputs`."""
        begins = packing.starts(batch.query_lens)
        ends = [begin + n // self.pool * self.pool for begin, n in zip(begins, batch.query_lens)]
        rows = packing.ranges(begins, ends, batch.device)
        return self.pool_keys(inputs[rows].unflatten(0, (-1, self.pool)))

    def pool_keys(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return K, fp32 [N, head_dim]. inputs [N, pool, 2 * head_dim]: k and z of the tokens of N pools."""
        k, z = inputs.float().chunk(2, -1)
        return ((z + self.index_kpool_compress_ape.float()).softmax(1) * k).sum(1)


def tokens_of_pools(pools: torch.Tensor, visible: torch.Tensor, pool: int) -> torch.Tensor:
    """Return int32 [T, P * pool + pool - 1]: the tokens of the selected pools, then the tokens after the last complete
    pool; ascending, padded with -1.

    pools    int32 [T, P]: the selected pools, ascending, padded with -1; all complete pools if there are at most P
    visible  int32 [T]: the number of tokens that each token sees
    """
    of_pools = (pools[..., None] * pool + torch.arange(pool, dtype=torch.int32, device=pools.device)).flatten(1)
    complete, visible = (visible // pool)[:, None], visible[:, None]
    count = complete.clamp(max=pools.shape[1]) * pool  # tokens of the selected pools
    columns = torch.arange(of_pools.shape[1] + pool - 1, dtype=torch.int32, device=pools.device)
    tail = complete * pool + columns - count
    tail = torch.where(tail < visible, tail, -1)
    return torch.where(columns < count, nn.functional.pad(of_pools, (0, pool - 1)), tail)
