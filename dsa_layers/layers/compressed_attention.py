"""DeepSeek-V4's attention: one softmax over a sliding window of tokens and compressed entries of earlier tokens."""

import torch
from torch import nn

import dsa
from dsa_layers.batch import packing
from dsa_layers.batch.token_batch import TokenBatch, check_batch, check_no_cache, check_tokens
from dsa_layers.batch.views import EntryView
from dsa_layers.cache.compressed_kv_cache import CompressedLayerCache
from dsa_layers.layers.compressor import CompressedIndexer, Compressor
from dsa_layers.layers.linear import GroupedLinear, check_rows, make_linear
from dsa_layers.layers.norm import RMSNorm
from dsa_layers.layers.rope import Angles, RopeAngles


class CompressedAttention(nn.Module):
    """o[t, h] = sum_j e^{z_j} k_j / (sum_j e^{z_j} + e^{sink_h}), z_j = dim^-0.5 q[t, h] . k_j, over the keys k_j of t.

    The keys of token t are the last `window` tokens up to t, and compressed entries. The indexer selects these entries;
    without an indexer, they are all entries that t may see. A layer without a compressor has no entries. Keys are also
    values.
      qr = q_norm(wq_a x)
      q = wq_b qr per head, divided by its root mean square, with rope on the last channels
      key of a token = kv_norm(wkv x), with rope on the last channels
      y = wo_b(wo_a(o)), where wo_a has one matrix per group of heads. Before wo_a, the last channels of o are rotated
      back by the angle of t, so that the result depends only on the distance between t and its keys.

    forward(x [T, hidden], rope, entry_rope, batch, cache=None) -> [T, hidden]
    rope: (cos, sin) at the tokens' positions, fp32 [T, rope_dim / 2]. entry_rope: (cos, sin) at the entries' positions
    (`EntryView.positions`); None without a compressor. batch: complete packed sequences.
    This class supports gradients but no cache; `dsa_layers.fuse` converts it to `PagedCompressedAttention`, which
    supports a cache but no gradients. fp8, dtype, use_ue8m0: see `make_linear`.
    Parameters: wq_a [q_lora_rank, hidden], q_norm, wq_b [heads * dim, q_lora_rank], wkv [dim, hidden], kv_norm,
    attn_sink fp32 [heads], wo_a [groups * o_lora_rank, heads * dim / groups], wo_b [hidden, groups * o_lora_rank],
    compressor, indexer.
    Source: `Attention` of DeepSeek-V4's inference code; arXiv 2606.19348, section 2.3.
    """

    def __init__(
        self,
        hidden: int,
        n_heads: int,
        *,
        dim: int = 512,
        window: int = 128,
        q_lora_rank: int,
        o_groups: int,
        o_lora_rank: int,
        compressor: Compressor | None = None,
        indexer: CompressedIndexer | None = None,
        eps: float = 1e-6,
        fp8: bool = False,
        dtype: torch.dtype | None = None,
        use_ue8m0: bool = True,
    ) -> None:
        super().__init__()
        if n_heads % o_groups:
            raise ValueError(f"o_groups: must divide n_heads={n_heads}, got {o_groups}")
        if indexer is not None and compressor is None:
            raise ValueError("indexer: needs a compressor, got None")
        self.n_heads, self.dim, self.window, self.o_groups, self.eps = n_heads, dim, window, o_groups, eps
        options = {"fp8": fp8, "dtype": dtype, "use_ue8m0": use_ue8m0}
        self.wq_a = make_linear(hidden, q_lora_rank, **options)
        self.q_norm = RMSNorm(q_lora_rank, eps)
        self.wq_b = make_linear(q_lora_rank, n_heads * dim, **options)
        self.wkv = make_linear(hidden, dim, **options)
        self.kv_norm = RMSNorm(dim, eps)
        self.attn_sink = nn.Parameter(torch.zeros(n_heads, dtype=torch.float32))
        self.wo_a = GroupedLinear(o_groups, n_heads * dim // o_groups, o_lora_rank, **options)
        self.wo_b = make_linear(o_groups * o_lora_rank, hidden, **options)
        self.compressor, self.indexer = compressor, indexer

    def forward(
        self,
        x: torch.Tensor,
        rope: Angles,
        entry_rope: Angles | None,
        batch: TokenBatch,
        cache: CompressedLayerCache | None = None,
    ) -> torch.Tensor:
        self.check_pass(x, batch)
        check_tokens(x, batch.positions)
        check_no_cache(cache, batch)
        qr = self.q_norm(self.wq_a(x))
        q = dsa.rms_norm(self.wq_b(qr).unflatten(-1, (self.n_heads, self.dim)), None, self.eps)
        q, keys = self._rotate(q, rope), self._rotate(self.kv_norm(self.wkv(x)), rope)
        rows = batch.windows(self.window, self.window).indices
        if self.compressor is not None and self.selectable(batch).max_key_len:
            # The entries follow the tokens in `keys`, so their rows are shifted by len(keys).
            entries = self.compressor.compress(x, *entry_rope, batch).to(x.dtype)
            of_entries = self._select(x, qr, rope, entry_rope, batch)
            rows = torch.cat((rows, torch.where(of_entries < 0, -1, of_entries + len(keys))), 1)
            keys = torch.cat((keys, entries))
        out, _ = dsa.sparse_mla_attention(q, keys[:, None], rows[:, None], self.dim**-0.5, self.dim, self.attn_sink)
        return self._project(out, rope, batch)

    def check_pass(self, x: torch.Tensor, batch: TokenBatch) -> None:
        """Raise TypeError or ValueError if x does not fit the weights, or if `check_batch` rejects `batch`."""
        check_rows("x", x, self.wq_a)
        check_batch(batch)

    def selectable(self, batch: TokenBatch) -> EntryView:
        """Return the view of the keys that the indexer selects from: the compressed entries."""
        return batch.entries(self.compressor.ratio)

    def _rotate(self, x: torch.Tensor, rope: Angles) -> torch.Tensor:
        return dsa.apply_rotary(x, *rope, interleaved=True, dims="last")

    def _project(self, out: torch.Tensor, rope: Angles, batch: TokenBatch) -> torch.Tensor:
        """Compute y [T, hidden] from attention's outputs [T, heads, dim]."""
        out = self._rotate(out, RopeAngles.of(rope).back)
        return self.wo_b(self.wo_a(out.flatten(1).unflatten(-1, (self.o_groups, -1))).flatten(1))

    def _select(
        self, x: torch.Tensor, qr: torch.Tensor, rope: Angles, entry_rope: Angles, batch: TokenBatch
    ) -> torch.Tensor:
        """Return int32 [T, K]: for each token, the entries that the token attends to, as rows of all packed entries,
        padded with -1."""
        entries = self.selectable(batch)
        if self.indexer is not None and entries.max_key_len > self.indexer.top_k:
            positions = self.indexer.select(x, qr, rope, batch, entry_rope=entry_rope)
            return packing.packed_rows(positions, entries.key_starts, len(batch.key_lens))
        columns = torch.arange(entries.max_key_len, dtype=torch.int32, device=x.device)
        return torch.where(columns < entries.visible_keys[:, None], entries.rows, -1)
