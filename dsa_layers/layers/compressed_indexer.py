"""DeepSeek-V4's lightning indexer: which compressed entries a query token attends to."""

import torch
from torch import nn

import dsa
from dsa_layers.batch.rows import ALL_ROWS, Rows
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.compressed_kv_cache import EntryCache
from dsa_layers.layers.compressor import Compressor
from dsa_layers.layers.key_selection import WORKSPACE, select_packed, select_paged
from dsa_layers.layers.linear import FP32Linear, linear_fp32, make_linear
from dsa_layers.layers.score_accumulators import SCORE_ACCUMULATORS


class CompressedIndexer(nn.Module):
    """I[t, s] = sum_h w[t, h] relu(q[t, h] . k[s]); each token attends to the `top_k` largest I of entries it may see.

    q = wq_b(qr) per head, with rope on the last dims in interleaved pairs; k the entries of a compressor of its own;
    w = weights_proj(x) * n_heads^-0.5 * head_dim^-0.5 in fp32. If `quantize`, q and k pass the Hadamard transform and
    go to e4m3 with a power-of-two scale per head and entry (the published model simulates FP4, which Hopper cannot
    multiply); the queries' scales fold into w. workspace: bytes that a prompt's scores take at most at a time, if that
    is enough for one token's. accumulators: as of `LightningIndexer`.

    `select` is that of `dsa_layers.layers.indexer.Indexer`, whose keys are compressed entries here, and asks for one
    argument more: entry_rope, (cos, sin) of the entries that the tokens may end. There is no `loss`: this indexer is
    not trained here.
    Parameters: wq_b [n_heads * head_dim, q_lora_rank], weights_proj [n_heads, hidden], compressor. Entries of equal
    score: the first win. Selection takes no gradient.
    Source: `Indexer` of DeepSeek-V4's inference code; arXiv 2606.19348, section 2.3.
    """

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
        super().__init__()
        self.accumulators, self.workspace = accumulators, workspace
        self.n_heads, self.head_dim, self.top_k, self.quantize = n_heads, compressor.dim, top_k, quantize
        self.wq_b = make_linear(q_lora_rank, n_heads * self.head_dim, fp8=fp8, dtype=dtype, use_ue8m0=use_ue8m0)
        self.weights_proj = FP32Linear(hidden, n_heads, scale=self.weight_scale, dtype=dtype)
        self.compressor = compressor

    @property
    def weight_scale(self) -> float:
        """What w is multiplied by."""
        return self.n_heads**-0.5 * self.head_dim**-0.5

    def head_weights(self, x: torch.Tensor) -> torch.Tensor:
        """w fp32 [T, n_heads]."""
        return linear_fp32(x, self.weights_proj.weight, self.weight_scale)

    @torch.no_grad()
    def select(
        self,
        x: torch.Tensor,
        qr: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: TokenBatch,
        cache: EntryCache | None = None,
        *,
        entry_rope: tuple[torch.Tensor, torch.Tensor],
        paged_slots: bool = False,
        store_only: bool = False,
        keys: tuple[torch.Tensor, torch.Tensor] | None = None,
        queries: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        stored: bool = False,
        rows: Rows = ALL_ROWS,
    ) -> torch.Tensor | None:
        """keys: what the compressor's `project` makes of x, queries: wq_b(qr), and weights: `head_weights` of x, where
        the caller has them; stored: whether the compressor's `store` has had the keys already. rows: where x, qr,
        queries and weights are a process's own rows, for which it selects; keys are all rows'."""
        if store_only and cache is None:
            return None
        projected = self.compressor.project(x) if keys is None else keys
        if cache is not None and not stored:
            self.compressor.store(*projected, *entry_rope, batch, cache)
        if store_only:
            return None
        q = (self.wq_b(qr) if queries is None else queries).unflatten(-1, (self.n_heads, self.head_dim))
        weights = self.head_weights(x) if weights is None else weights
        angles = rows.own_kept(cos), rows.own_kept(sin)
        if self.quantize:
            q, weights = dsa.quantize_indexer_queries(q, weights, *angles, interleaved=True, dims="last")
        else:
            q = dsa.apply_rotary(q, *angles, interleaved=True, dims="last")
        entries = batch.entries(self.compressor.ratio)
        page_size = entries.page_size if paged_slots else None
        if self.quantize and batch.is_decode and cache is not None:
            pages, lengths = (cache.pages, batch.block_table), entries.visible_by_sequence
            return select_paged(q, *pages, weights, self.top_k, lengths, entries, max(entries.most, 1), page_size)
        if cache is None:
            keys = self.compressor.entries(*projected, *entry_rope, batch).to(x.dtype)
            if self.quantize:
                keys, scale = dsa.per_token_cast_to_fp8(keys, True, self.head_dim, hadamard=True)
                keys = keys, scale.squeeze(-1)
        else:
            read = dsa.read_indexer_cache if self.quantize else dsa.read_kv_cache
            keys = read(cache.pages, entries.all_slots)
        paging = {}
        if paged_slots:
            sequences = rows.own_kept(batch.sequences)
            paging = {"block_table": batch.block_table, "page_size": page_size, "row_to_seq": sequences}
        starts, lengths, most = entries.visible_ranges
        ranges = rows.own_kept(starts), rows.own_kept(lengths), most
        options = {"accumulators": self.accumulators, "workspace": self.workspace}
        options["key_lens"] = entries.lens if batch.is_decode else None
        return select_packed(q, keys, weights, self.top_k, *ranges, **options, **paging)
