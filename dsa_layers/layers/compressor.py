"""DeepSeek-V4's compressor, which computes one entry per block of `ratio` tokens, and its indexer, which selects
entries."""

from typing import Any, ClassVar

import torch
from torch import nn

import dsa
from dsa_layers.batch.token_batch import TokenBatch, check_no_cache
from dsa_layers.cache.compressed_kv_cache import DRAFTS, CompressedLayerCache
from dsa_layers.layers.key_selection import SCORE_ACCUMULATORS, WORKSPACE, KeySelection
from dsa_layers.layers.linear import FP32Linear, make_linear
from dsa_layers.layers.norm import RMSNorm
from dsa_layers.layers.rope import Angles


class Compressor(nn.Module):
    """C_i = rope_{i m}(RMSNorm(sum_j softmax_j(Z_j) KV_j)), where j runs over the tokens of block i, and m = ratio.

    KV = x wkv^T and Z = x wgate^T + ape[j mod m], in fp32. The softmax is per channel. With `overlap`, wkv and wgate
    have 2 * dim output channels. The sum of entry i then runs over the tokens of blocks i - 1 and i: block i - 1
    contributes its first dim channels, and block i its last dim channels. Rope rotates the last channels of an entry in
    interleaved pairs.

    compress(x [T, hidden], cos, sin, batch) -> fp32 [N, dim]: the N packed entries of complete sequences.
    cos, sin: fp32 [T, rope_dim / 2] at `EntryView.positions`: row t is for the entry that ends with token t.
    Parameters: wkv, wgate [c, hidden], ape fp32 [ratio, c], norm [dim]; c = 2 dim with overlap, else dim.
    Source: `Compressor` of DeepSeek-V4's inference code; arXiv 2606.19348, section 2.3.
    """

    def __init__(
        self,
        hidden: int,
        dim: int,
        ratio: int,
        *,
        overlap: bool,
        eps: float = 1e-6,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.ratio, self.overlap = dim, ratio, overlap
        channels = 2 * dim if overlap else dim
        self.wkv, self.wgate = (FP32Linear(hidden, channels, dtype=dtype) for _ in range(2))
        self.ape = nn.Parameter(torch.zeros(ratio, channels, dtype=torch.float32))
        self.norm = RMSNorm(dim, eps)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape (rows, 2, c) of one sequence's state in the cache: the result of `project` for the latest tokens.
        One row per token of an entry's sum, and DRAFTS more, so that a rejected draft overwrites no needed row."""
        return ((2 * self.ratio if self.overlap else self.ratio) + DRAFTS, 2, self.ape.shape[1])

    def compress(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        return self.entries(*self.project(x), cos, sin, batch)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the projections of x: KV, and Z without the term ape, both fp32 [T, c]."""
        return self.wkv(x), self.wgate(x)

    def entries(
        self, kv: torch.Tensor, gate: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: TokenBatch
    ) -> torch.Tensor:
        """Compute the entries, fp32 [N, dim], from the results (kv, gate) of `project`."""
        m, d, first = self.ratio, self.dim, 0
        entries, ends = [kv.new_empty(0, d, dtype=torch.float32)], [torch.arange(0, device=kv.device)]
        for k, z in zip(kv.split(batch.query_lens), gate.split(batch.query_lens)):
            count, tokens = len(k) // m, len(k)
            k, z = (x[: count * m].float().unflatten(0, (count, m)) for x in (k, z))
            z = z + self.ape
            if self.overlap and count:
                before = k.new_zeros(1, m, d), z.new_full((1, m, d), -torch.inf)  # padding before the first block
                k_before, z_before = (torch.cat((pad, x[:-1, :, :d])) for pad, x in zip(before, (k, z)))
                k, z = torch.cat((k_before, k[..., d:]), 1), torch.cat((z_before, z[..., d:]), 1)
            if count:
                entries.append((z.softmax(1) * k).sum(1))
                ends.append(torch.arange(first + m - 1, first + count * m, m, device=kv.device))
            first += tokens
        tokens = torch.cat(ends)
        entries = self.norm(torch.cat(entries))
        return dsa.apply_rotary(entries, cos[tokens], sin[tokens], interleaved=True, dims="last")


class CompressedIndexer(KeySelection):
    """I[t, s] = sum_h w[t, h] relu(q[t, h] . k[s]). Token t attends to the `top_k` entries s with the largest I[t, s]
    among the entries that it may see.

    q = wq_b(qr) per head, with rope on the last channels in interleaved pairs
    k = the entries of the indexer's compressor
    w = weights_proj(x) * n_heads^-0.5 * head_dim^-0.5, in fp32

    If `quantize`, q and k are Hadamard-transformed and cast to e4m3, and head_dim must be 128. Each head of a query and
    each entry has one power-of-two scale; the scales of the queries are multiplied into w. The published model
    simulates FP4 instead.
    top_k, workspace, accumulators: see `KeySelection`. fp8, dtype, use_ue8m0: of wq_b, see `make_linear`.

    `select` has the interface of `dsa_layers.layers.indexer.Indexer.select`, and one more argument entry_rope: (cos,
    sin) at `EntryView.positions`. It has no gradient, and there is no `loss`.
    Parameters: wq_b [n_heads * head_dim, q_lora_rank], weights_proj [n_heads, hidden], compressor.
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
        rope: Angles,
        batch: TokenBatch,
        cache: CompressedLayerCache | None = None,
        *,
        entry_rope: Angles,
    ) -> torch.Tensor:
        check_no_cache(cache, batch)
        keys = self.compressor.compress(x, *entry_rope, batch).to(x.dtype)
        entries = batch.entries(self.compressor.ratio)
        return self.select_new(self.wq_b(qr), keys, self.head_weights(x), rope, entries, batch.is_decode)
