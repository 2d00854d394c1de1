"""DeepSeek-V4's lightning indexer: it selects the compressed entries that each token attends to."""

from typing import Any, ClassVar

import torch

from dsa_layers.batch.token_batch import TokenBatch, check_no_cache
from dsa_layers.cache.compressed_kv_cache import CompressedLayerCache
from dsa_layers.layers.compressor import Compressor
from dsa_layers.layers.indexer import SCORE_ACCUMULATORS, WORKSPACE, KeySelection, Rope
from dsa_layers.layers.linear import FP32Linear, make_linear


class CompressedIndexer(KeySelection):
    """I[t, s] = sum_h w[t, h] relu(q[t, h] . k[s]). Token t attends to the `top_k` entries s with the largest I[t, s]
    among the entries that it may see.

    q = wq_b(qr) per head, with rope on the last channels in interleaved pairs
    k = the entries of the indexer's compressor
    w = weights_proj(x) * n_heads^-0.5 * head_dim^-0.5, in fp32

    If `quantize`, q and k are Hadamard-transformed and cast to e4m3. Each head of a query and each entry has one
    power-of-two scale; the scales of the queries are multiplied into w. The published model simulates FP4, which
    Hopper cannot multiply.
    top_k, workspace, accumulators: see `KeySelection`.

    `select` implements `dsa_layers.layers.indexer.Indexer.select` for compressed entries. It has an additional argument
    entry_rope: (cos, sin) at the entries' positions (`EntryView.positions`). This indexer has no `loss`.
    Parameters: wq_b [n_heads * head_dim, q_lora_rank], weights_proj [n_heads, hidden], compressor.
    Among entries with equal scores, the first entries are selected. Selection has no gradient.
    Source: `Indexer` of DeepSeek-V4's inference code; arXiv 2606.19348, section 2.3.
    """

    rope: ClassVar[dict[str, Any]] = {"interleaved": True, "dims": "last"}

    def __init__(
        self,
        hidden: int,
        q_lora_rank: int,
        compressor: Compressor,
        *,
        n_heads: int = 64,
        top_k: int = 512,
        quantize: bool = True,
        fp8: bool = False,
        dtype: torch.dtype | None = None,
        use_ue8m0: bool = True,
        workspace: int = WORKSPACE,
        accumulators: torch.dtype = SCORE_ACCUMULATORS,
    ) -> None:
        super().__init__(top_k, workspace, accumulators)
        self.n_heads, self.head_dim, self.quantize = n_heads, compressor.dim, quantize
        self.wq_b = make_linear(q_lora_rank, n_heads * self.head_dim, fp8=fp8, dtype=dtype, use_ue8m0=use_ue8m0)
        self.weights_proj = FP32Linear(hidden, n_heads, scale=self.weight_scale, dtype=dtype)
        self.compressor = compressor

    @torch.no_grad()
    def select(
        self,
        x: torch.Tensor,
        qr: torch.Tensor,
        rope: Rope,
        batch: TokenBatch,
        cache: CompressedLayerCache | None = None,
        *,
        entry_rope: Rope,
    ) -> torch.Tensor:
        check_no_cache(cache, batch)
        keys = self.compressor.compress(x, *entry_rope, batch).to(x.dtype)
        entries = batch.entries(self.compressor.ratio)
        return self.select_new(self.wq_b(qr), keys, self.head_weights(x), rope, entries, batch.is_decode)
