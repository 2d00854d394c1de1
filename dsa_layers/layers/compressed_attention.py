"""DeepSeek-V4's attention: a sliding window, and compressed entries of all earlier tokens, in one softmax."""

import inspect
from typing import Any

import torch
from torch import nn

import dsa
from dsa_layers.batch import packing
from dsa_layers.batch.entry_view import EntryView
from dsa_layers.batch.rows import ALL_ROWS, Rows
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.batch.window_view import WindowView
from dsa_layers.cache.compressed_kv_cache import CompressedLayerCache
from dsa_layers.layers import joint_linear
from dsa_layers.layers.compressed_indexer import CompressedIndexer
from dsa_layers.layers.compressor import Compressor
from dsa_layers.layers.grouped_linear import GroupedLinear
from dsa_layers.layers.linear import BlockFP8Linear, Linear, make_linear
from dsa_layers.layers.norm import RMSNorm
from dsa_layers.layers.norm_and_cast import norm_and_cast, watched
from dsa_layers.layers.rope import RopeAngles, turn
from dsa_layers.layers.selecting_attention import KeyCounter
from dsa_layers.layers.shares import Shares

Angles = tuple[torch.Tensor, torch.Tensor]
FEW_HEADS = 32  # attention of so many has a kernel of its own, which casts nothing
COMPRESSED_SELECT = inspect.unwrap(CompressedIndexer.select)


class CompressedAttention(nn.Module):
    """o[t, h] = sum_j e^{z_j} k_j / (sum_j e^{z_j} + e^{sink_h}), z_j = dim^-0.5 q[t, h] . k_j, over t's keys k_j.

    These keys are the last `window` tokens up to t, and the compressor's entries that the indexer selects among those
    that t may see; without an indexer they are all entries that t may see, and without a compressor the window alone.
    Keys are also the values.
      qr = q_norm(wq_a x), q = wq_b qr per head, divided by its root mean square, with rope on the last dims;
      token keys: kv_norm(wkv x) with rope on the last dims; y = wo_b(wo_a by groups of heads(o)), after the rope of o's
      last dims is turned back by t's angle, so that only the distance to a key counts.

    forward(x [T, hidden], rope, entry_rope, batch, cache=None, cast=None, rows=...) -> [T, hidden]. rope: (cos, sin)
    fp32 [T, rope_dim / 2] of the tokens, as `RopeAngles` if other layers turn by them, too; entry_rope: of the entries
    that the tokens may end (`EntryView.positions`), None without a compressor; cast: of x, for `joint_layers`, where
    the caller has it (`norm_and_cast`); rows: as of `DSAAttention`.
    Parameters: wq_a [q_lora_rank, hidden], q_norm, wq_b [heads * dim, q_lora_rank], wkv [dim, hidden], kv_norm,
    attn_sink fp32 [heads], wo_a [groups * o_lora_rank, heads * dim / groups], wo_b [hidden, groups * o_lora_rank],
    compressor, indexer.
    Source: `Attention` of DeepSeek-V4's inference code; arXiv 2606.19348, section 2.3.
    """

    shares = Shares(
        rows=("wq_b", "attn_sink"),
        columns=("wo_b",),
        counts={"n_heads": "attention heads", "o_groups": "groups of attention heads"},
    )

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
        # Set while the keys that tokens read are counted.
        self.key_counter: KeyCounter | None = None

    def forward(
        self,
        x: torch.Tensor,
        rope: Angles,
        entry_rope: Angles | None,
        batch: TokenBatch,
        cache: CompressedLayerCache | None = None,
        *,
        cast: joint_linear.Cast | None = None,
        rows: Rows = ALL_ROWS,
    ) -> torch.Tensor:
        if cache is None and batch.query_lens != batch.key_lens:
            raise ValueError("cache: is needed when a sequence has more keys than new tokens")
        qr, kv = joint_linear.multiply(x, *self.joint_layers(), cast=cast)
        decode = cache is not None and batch.is_decode
        readers = (self.wq_b, self.indexer.wq_b) if self._gives_queries(batch, decode) else (self.wq_b,)
        _, qr, cast = norm_and_cast(self.q_norm, qr, readers)
        of_index = {}
        if rows.shared:
            own, queries = qr, joint_linear.multiply(qr, *readers[1:], cast=cast) if readers[1:] else ()
            (kv,) = rows.gather(kv)
            q = joint_linear.multiply_gathered(own, self.wq_b, cast, rows)
            if self.compressor is not None:
                (x,) = rows.gather(x)
            if queries:
                of_index["rows"] = rows
            elif self.indexer is not None and self._selects(batch):  # by another way of selecting
                (qr,) = rows.gather(qr)
        else:
            q, *queries = joint_linear.multiply(qr, *readers, cast=cast)
        of_index |= zip(("queries",), queries)
        q = dsa.rms_norm(q.unflatten(-1, (self.n_heads, self.dim)), None, self.eps)
        q = turn(q, *rope, interleaved=True, dims="last")
        attend = self._decode if decode else self._prefill
        return attend(x, q, qr, of_index, kv, rope, entry_rope, batch, cache)

    def joint_layers(self) -> tuple[Linear | BlockFP8Linear, ...]:
        """Those that read x as one product."""
        return self.wq_a, self.wkv

    def _gives_queries(self, batch: TokenBatch, decode: bool) -> bool:
        """Whether the indexer's `select` is to get its queries' product, which shares a cast with that of wq_b. Another
        way of selecting may take none; and torch.compile does not trace the question."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        if inspect.unwrap(getattr(self.indexer, "select", None)) is not COMPRESSED_SELECT:
            return False
        return decode or self._selects(batch)

    def _selects(self, batch: TokenBatch) -> bool:
        """Whether a sequence has more entries than its tokens attend to."""
        return batch.entries(self.indexer.compressor.ratio).most > self.indexer.top_k

    def _prefill(
        self,
        x: torch.Tensor,
        q: torch.Tensor,
        qr: torch.Tensor,
        of_index: dict[str, Any],
        kv: torch.Tensor,
        rope: Angles,
        entry_rope: Angles | None,
        batch: TokenBatch,
        cache: CompressedLayerCache | None,
    ) -> torch.Tensor:
        windows = self._windows(batch, cache)
        keys, cu_keys = self._token_keys(kv, rope, batch, cache), windows.cu_keys
        packed = (q, keys[:, None], batch.cu_query_lens, cu_keys, self.window)
        compressed, rows = self._entries(x, qr, of_index, rope, entry_rope, batch, cache)
        self._count_keys(batch, rows)
        if compressed is None or len(compressed) == 0:
            compressed = rows = counts = None
        if torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in (q, keys, compressed)):
            out = self._attend_with_gradients(q, keys, windows.indices, compressed, rows)
            return self._project(out, rope, batch)
        if compressed is not None:
            compressed = compressed[:, None]
            counts = batch.entries(self.compressor.ratio).selected_counts(rows.shape[1])
        scale, near = self.dim**-0.5, windows.indices
        if self._casts_results(rope):
            cast = dsa.window_attention_cast_to_fp8(
                *(*packed, compressed, rows, *rope, self.o_groups, scale, self.attn_sink),
                topk_length=counts,
                window_indices=near,
                use_ue8m0=self.wo_a.matrices.use_ue8m0,
            )
            return self.wo_a.multiply(cast, self.wo_b, batch, q.dtype)
        if compressed is None:
            out, _ = dsa.sliding_window_attention(*packed, scale, self.dim, self.attn_sink, indices=near)
        else:
            softmax = (scale, self.dim, self.attn_sink)
            out, _ = dsa.window_sparse_attention(
                *(*packed, compressed, rows, *softmax), topk_length=counts, window_indices=near
            )
        return self._project(out, rope, batch)

    def _attend_with_gradients(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        near: torch.Tensor,
        entries: torch.Tensor | None,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """What `_prefill` attends to, by the op that has gradients: the window's keys and the entries lie in one array,
        of which each token has its rows."""
        if entries is not None:
            near = torch.cat((near, torch.where(rows < 0, -1, rows + len(keys))), 1)
            keys = torch.cat((keys, entries))
        out, _ = dsa.sparse_mla_attention(q, keys[:, None], near[:, None], self.dim**-0.5, self.dim, self.attn_sink)
        return out

    def _casts_results(self, rope: Angles) -> bool:
        """Whether a prompt's attention casts its results for wo_a: FP8 weights, for inference, where nobody else looks
        at wo_a's input, of sizes for which that is faster, and the kernel is made."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or watched(self.wo_a):
            return False
        sizes = self.n_heads > FEW_HEADS and self.dim == 512 and rope[0].shape[1] == 32
        return sizes and type(self.wo_a.matrices) is BlockFP8Linear

    def _project(self, out: torch.Tensor, rope: Angles, batch: TokenBatch) -> torch.Tensor:
        """y of attention's results [T, heads, dim]."""
        out = turn(out, *RopeAngles.of(rope).back, interleaved=True, dims="last")
        return self.wo_a(out.flatten(1).unflatten(-1, (self.o_groups, -1)), self.wo_b, batch)

    def _windows(self, batch: TokenBatch, cache: CompressedLayerCache | None) -> WindowView:
        return batch.windows(self.window, self.window if cache is None else cache.window.shape[1])

    def _token_keys(
        self, kv: torch.Tensor, rope: Angles, batch: TokenBatch, cache: CompressedLayerCache | None
    ) -> torch.Tensor:
        """Keys of the tokens that the new ones see, in the order of `WindowView.order`; the new ones', whose wkv(x) is
        kv, to the ring."""
        if cache is None:
            return turn(self.kv_norm(kv), *rope, interleaved=True, dims="last")
        windows, norm = self._windows(batch, cache), self.kv_norm
        earlier = None
        if any(windows.earlier_lens):
            earlier = dsa.read_kv_cache(cache.window, windows.earlier_slots, dtype=kv.dtype)
        # Of a ring of bytes the rows are rounded as those that are read from it: all queries see the same keys.
        rows = torch.empty_like(kv)
        dsa.write_mla_cache(kv, norm.weight.float(), *rope, cache.window, windows.slots, eps=norm.eps, out=rows)
        if earlier is None:
            return rows
        keys = torch.cat((earlier, rows))
        return keys if windows.in_order else keys[windows.order]

    def _entries(
        self,
        x: torch.Tensor,
        qr: torch.Tensor,
        of_index: dict[str, Any],
        rope: Angles,
        entry_rope: Angles | None,
        batch: TokenBatch,
        cache: CompressedLayerCache | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(all entries packed [N, dim], the rows of those that each new token attends to int32 [T, K])."""
        if self.compressor is None:
            return None, None
        entries = batch.entries(self.compressor.ratio)
        if cache is None:
            compressed = self.compressor.entries(x, *entry_rope, batch)
        else:
            self.compressor.store(x, *entry_rope, batch, cache.entries)
            compressed = dsa.read_kv_cache(cache.entries.pages, entries.all_slots, dtype=x.dtype)
        if self.indexer is None:
            return compressed, entries.rows
        index_cache = None if cache is None else cache.index_entries
        dense = entries.most <= self.indexer.top_k
        options = {"entry_rope": entry_rope, "store_only": dense, **of_index}
        topk_indices = self.indexer.select(x, qr, *rope, batch, index_cache, **options)
        if dense:
            return compressed, entries.rows
        return compressed, packing.packed_rows(topk_indices, entries.starts, len(batch.key_lens))

    def selectable(self, batch: TokenBatch) -> EntryView:
        """The keys among which the indexer selects: entries."""
        return batch.entries(self.compressor.ratio)

    def _count_keys(self, batch: TokenBatch, entries: torch.Tensor | None) -> None:
        """entries int32 [T, ..., K]: those that each new token reads beside its window, -1 where there are fewer."""
        if self.key_counter is None:
            return
        context = batch.visible_keys
        read = dense = context.clamp(max=self.window)
        if entries is not None:
            read = read + (entries >= 0).flatten(1).sum(-1)
            dense = dense + batch.entries(self.compressor.ratio).visible_keys
        self.key_counter.add(read, dense, context)

    def _decode(
        self,
        x: torch.Tensor,
        q: torch.Tensor,
        qr: torch.Tensor,
        of_index: dict[str, Any],
        kv: torch.Tensor,
        rope: Angles,
        entry_rope: Angles | None,
        batch: TokenBatch,
        cache: CompressedLayerCache,
    ) -> torch.Tensor:
        windows, norm = self._windows(batch, cache), self.kv_norm
        dsa.write_mla_cache(kv, norm.weight.float(), *rope, cache.window, windows.slots, eps=norm.eps)
        slots, extra = None, {}
        if self.compressor is not None:
            entries = batch.entries(self.compressor.ratio)
            self.compressor.store(x, *entry_rope, batch, cache.entries)
            if self.indexer is None:
                slots = entries.slot_table
            else:
                options = {"entry_rope": entry_rope, "paged_slots": True, **of_index}
                slots = self.indexer.select(x, qr, *rope, batch, cache.index_entries, **options)
                slots = slots.unflatten(0, (-1, batch.next_n))
            extra = {"extra_k_cache": cache.entries.pages, "extra_indices_in_kvcache": slots}
            extra["extra_topk_length"] = entries.most_selected(slots.shape[2])
        self._count_keys(batch, slots)
        # On a GPU bytes are attended to in bf16, whatever the model's dtype: they have 4 bits.
        dtype = torch.bfloat16 if cache.is_fp8 and q.is_cuda else q.dtype
        out, _ = dsa.flash_mla_with_kvcache(
            *(q.unflatten(0, (-1, batch.next_n)).to(dtype), cache.window, None, None, self.dim, None),
            softmax_scale=self.dim**-0.5,
            is_fp8_kvcache=cache.is_fp8,
            indices=windows.decode_slots,
            topk_length=batch.most_selected(self.window),
            attn_sink=self.attn_sink,
            **extra,
        )
        return self._project(out.flatten(0, 1).to(q.dtype), rope, batch)
