"""DeepSeek-V4's attention: a sliding window, and compressed entries of all earlier tokens, in one softmax."""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

import dsa
from dsa_layers.batch import packing
from dsa_layers.batch.entry_view import EntryView
from dsa_layers.batch.rows import ALL_ROWS, Rows, moved
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.batch.window_view import WindowView
from dsa_layers.cache.compressed_kv_cache import CompressedLayerCache
from dsa_layers.layers import joint_linear
from dsa_layers.layers.batch_invariance import is_batch_invariant, of_attention
from dsa_layers.layers.branch import side_stream
from dsa_layers.layers.compressed_indexer import CompressedIndexer
from dsa_layers.layers.compressor import Compressor
from dsa_layers.layers.grouped_linear import GroupedLinear
from dsa_layers.layers.linear import BLOCK, BlockFP8Linear, FP32Linear, Linear, make_linear
from dsa_layers.layers.norm import RMSNorm
from dsa_layers.layers.norm_and_cast import norm_and_cast, watched
from dsa_layers.layers.own_part import SplitByTokens
from dsa_layers.layers.pass_checks import check_batch, check_cache, check_entries, check_rows, check_stored_keys
from dsa_layers.layers.rope import RopeAngles, turn
from dsa_layers.layers.selecting_attention import KeyCounter
from dsa_layers.layers.shares import Shares

Angles = tuple[torch.Tensor, torch.Tensor]
MOST_CHANNELS, VECTOR = 512, 8  # of a head, for rope in one kernel with the norm or the cast; channels at a time
FEW_HEADS = 32  # attention of so many has a kernel of its own, which casts nothing
COMPRESSED_SELECT = inspect.unwrap(CompressedIndexer.select)


class QueryLatents(NamedTuple):
    """What queries are made of. values [T, q_lora_rank], and a cast of them for those that read it, or None."""

    values: torch.Tensor
    cast: joint_linear.Cast | None


class Projections(NamedTuple):
    """What is made of x. latents: the queries'; keys [T, dim]: before their norm; entries: what the compressor's
    `project` gives, () without one; index_entries: the same of the lightning indexer's compressor, where its `select`
    is to get it; index_weights fp32 [T, heads of the indexer]: its weights, where they are of one product with these.
    given: whether that `select` is to get products; selects: whether the indexer does more than to store its keys."""

    latents: QueryLatents
    keys: torch.Tensor
    entries: tuple[torch.Tensor, ...]
    index_entries: tuple[torch.Tensor, ...] | None
    index_weights: torch.Tensor | None
    given: bool
    selects: bool

    @staticmethod
    def of(
        latents: QueryLatents,
        keys: torch.Tensor,
        products: list[torch.Tensor],
        weights: torch.Tensor | None,
        given: bool,
        selects: bool,
    ) -> "Projections":
        """products: of all compressors, two each."""
        return Projections(latents, keys, tuple(products[:2]), tuple(products[2:]) or None, weights, given, selects)

    def read(self) -> tuple[torch.Tensor, ...]:
        """Those that the selection of entries, or a write of keys, reads."""
        weights = () if self.index_weights is None else (self.index_weights,)
        latents = self.latents.values, *(self.latents.cast or ())
        return *latents, self.keys, *self.entries, *(self.index_entries or ()), *weights


class CompressedAttention(SplitByTokens):
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
    the caller has it (`norm_and_cast`); rows, and a cache where keys would need gradients: as of `DSAAttention`.
    Parameters: wq_a [q_lora_rank, hidden], q_norm, wq_b [heads * dim, q_lora_rank], wkv [dim, hidden], kv_norm,
    attn_sink fp32 [heads], wo_a [groups * o_lora_rank, heads * dim / groups], wo_b [hidden, groups * o_lora_rank],
    compressor, indexer.
    Source: `Attention` of DeepSeek-V4's inference code; arXiv 2606.19348, section 2.3.
    """

    shares = Shares(
        rows=("wq_b", "attn_sink", "wo_a"),
        columns=("wo_b",),
        counts={"n_heads": "attention heads", "o_groups": "groups of attention heads"},
        heads="n_heads",
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
        check_rows("x", x, self.wq_a)
        check_batch(batch)
        if cache is not None:
            check_cache(cache, CompressedLayerCache)
            if self.compressor is not None:
                check_entries("entries", cache.entries, self.compressor.ratio, batch)
            if self.indexer is not None:
                check_entries("index_entries", cache.index_entries, self.indexer.compressor.ratio, batch)
            check_stored_keys(x, wkv=self.wkv, kv_norm=self.kv_norm, compressor=self.compressor)
        elif batch.query_lens != batch.key_lens:
            raise ValueError("cache: is needed when a sequence has more keys than new tokens")
        if self.own_part is not None and rows.shared:
            return self._attend(x, rope, entry_rope, batch, cache, cast, rows, queries=rows)
        return rows.sum(self.part()._attend(x, rope, entry_rope, batch, cache, cast, rows, queries=ALL_ROWS))

    def _attend(
        self,
        x: torch.Tensor,
        rope: Angles,
        entry_rope: Angles | None,
        batch: TokenBatch,
        cache: CompressedLayerCache | None,
        cast: joint_linear.Cast | None,
        rows: Rows,
        queries: Rows,
    ) -> torch.Tensor:
        """y of `queries`: of all rows, or of `rows`, a process's own, as x is."""
        if cache is not None and batch.is_decode:
            return self._decode(x, rope, entry_rope, batch, cache, cast, rows, queries)
        latents, projecting = self._begin_projections(x, cast, batch, cache, rows)
        q = self._queries(latents, rope, rows, queries)  # while what is made of other processes' rows is on its way
        projected = projecting()
        del latents, projecting  # with this process's own rows
        keys = self._token_keys(projected.keys, rope, batch, cache)
        entries = self._entries(x, projected, rope, entry_rope, batch, cache, rows, queries)
        del projected  # of all rows in fp32, which attention has no need of
        return self._prefill(q, keys, *entries, queries.own_kept(rope), batch, cache, queries)

    def _begin_projections(
        self,
        x: torch.Tensor,
        cast: joint_linear.Cast | None,
        batch: TokenBatch,
        cache: CompressedLayerCache | None,
        rows: Rows,
    ) -> tuple[QueryLatents, Callable[[], Projections]]:
        """The queries' latents, and the function that gives all. What goes from process to process of shared rows are
        keys, what compressors make of x, and queries' latents where a process has not all heads (`_queries`)."""
        given, selects = self._gives_products(), self.indexer is not None and self._selects(batch)
        latents, kv = self._latents(x, cast, given and selects)
        # Where nothing is selected the indexer makes its keys for the cache alone.
        *products, weights = self._entry_products(x, given and (selects or cache is not None), given and selects)
        gathering = rows.begin_gather_joined(kv, *products)

        def end() -> Projections:
            keys, *products = gathering()
            return Projections.of(latents, keys, products, weights, given, selects)

        return latents, end

    def _latents(
        self, x: torch.Tensor, cast: joint_linear.Cast | None, selects: bool
    ) -> tuple[QueryLatents, torch.Tensor]:
        """The queries' latents, cast for the indexer's queries too if it `selects`, and wkv x."""
        qr, kv = joint_linear.multiply(x, *self.joint_layers(), cast=cast)
        readers = (self.wq_b, self.indexer.wq_b) if selects else (self.wq_b,)
        _, qr, cast = norm_and_cast(self.q_norm, qr, readers)
        return QueryLatents(qr, cast), kv

    def _entry_products(self, x: torch.Tensor, indexes: bool, weighs: bool) -> list[torch.Tensor | None]:
        """What the compressor's `project` makes of x, if the layer has one; if it `indexes` what the indexer's
        compressor's does; and last the indexer's weights if it `weighs` and they are of one product with these, else
        None."""
        compressors = [] if self.compressor is None else [self.compressor]
        compressors += [self.indexer.compressor] if indexes else []
        products = self._as_one(x, compressors, weighs)
        if products is None:
            products = [part for one in compressors for part in one.project(x)]
        return [*products, None] if len(products) == 2 * len(compressors) else [*products]

    def _queries(self, latents: QueryLatents, rope: Angles, rows: Rows, queries: Rows) -> torch.Tensor:
        """q [T, heads, dim] of `queries`, normed and turned."""
        if rows.shared and not queries.shared:
            q = joint_linear.multiply_gathered(latents.values, self.wq_b, latents.cast, rows)
        else:
            (q,) = joint_linear.multiply(latents.values, self.wq_b, cast=latents.cast)
        q = q.unflatten(-1, (self.n_heads, self.dim))
        angles = queries.own_kept(rope)
        if self._joins_rope(rope):
            return dsa.rms_norm_rotary(q, None, *angles, self.eps)
        return turn(dsa.rms_norm(q, None, self.eps), *angles, interleaved=True, dims="last")

    def _select(
        self,
        x: torch.Tensor,
        projected: Projections,
        rope: Angles,
        entry_rope: Angles | None,
        batch: TokenBatch,
        cache: CompressedLayerCache | None,
        rows: Rows,
        **options: bool,
    ) -> torch.Tensor | None:
        """What the indexer's `select` gives, of x's own rows where it is the lightning indexer's, else of all."""
        qr = projected.latents.values
        if projected.given:
            options |= {"keys": projected.index_entries, "weights": projected.index_weights, "rows": rows}
            if projected.selects:
                (options["queries"],) = joint_linear.multiply(qr, self.indexer.wq_b, cast=projected.latents.cast)
        elif rows.shared:
            x, qr = rows.gather(x, qr)
        index_cache = None if cache is None else cache.index_entries
        return self.indexer.select(x, qr, *rope, batch, index_cache, entry_rope=entry_rope, **options)

    def joint_layers(self) -> tuple[Linear | BlockFP8Linear, ...]:
        """Those that read x as one product."""
        return self.wq_a, self.wkv

    def joint_fp32_layers(self) -> tuple[FP32Linear, ...]:
        """Those of two compressors, and the indexer's that makes weights, that read x as one product. The weights' only
        where rows of all results lie at multiples of 16 bytes with them, too, as the compressors' kernels ask."""
        if self.indexer is None or any(
            type(one).project is not Compressor.project for one in (self.compressor, self.indexer.compressor)
        ):
            return ()
        keys = *self.compressor.joint_layers(), *self.indexer.compressor.joint_layers()
        return keys if self.indexer.n_heads % 4 else (*keys, self.indexer.weights_proj)

    def _as_one(self, x: torch.Tensor, compressors: list[Compressor], weighs: bool) -> tuple[torch.Tensor, ...] | None:
        """What two compressors make of x, where it is one product; and if it weighs heads and has them, the indexer's
        weights behind."""
        if len(compressors) < 2:
            return None
        layers = self.joint_fp32_layers()
        return joint_linear.multiply_as_one(x, *(layers if weighs else layers[: 2 * len(compressors)]))

    def _gives_products(self) -> bool:
        """Whether the indexer's `select` is to get the product of its queries, which shares a cast with that of wq_b,
        and what its compressor makes of x. Another way of selecting may take none; and torch.compile does not trace the
        question."""
        asked = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        return asked and inspect.unwrap(getattr(self.indexer, "select", None)) is COMPRESSED_SELECT

    def _selects(self, batch: TokenBatch) -> bool:
        """Whether a sequence has more entries than its tokens attend to."""
        return batch.entries(self.indexer.compressor.ratio).most > self.indexer.top_k

    def _prefill(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        compressed: torch.Tensor | None,
        rows: torch.Tensor | None,
        rope: Angles,
        batch: TokenBatch,
        cache: CompressedLayerCache | None,
        queries: Rows,
    ) -> torch.Tensor:
        """y of the queries q, whose angles are rope: attention to the keys of the tokens that they see, and to their
        rows of all entries."""
        windows = self._windows(batch, cache)
        # Which keys a query sees, row by row: of own queries, not the last ones of their sequences, the bounds do not
        # say it.
        near = queries.own_kept(windows.indices)
        packed = (q, keys[:, None], queries.own_bounds(batch.cu_query_lens), windows.cu_keys, self.window)
        if compressed is None or len(compressed) == 0:
            compressed = rows = counts = None
        else:
            compressed = compressed[:, None]
            counts = batch.entries(self.compressor.ratio).selected_counts(rows.shape[1])
            counts = None if counts is None else queries.own_kept(counts)
        if self.key_counter is not None:
            self._count_keys(batch, _listed(rows, counts), queries)
        if torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in (q, keys, compressed)):
            out = self._attend_with_gradients(q, keys, near, compressed, _listed(rows, counts))
            return self._project(out, rope, batch)
        scale = self.dim**-0.5
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
            keys = torch.cat((keys, entries.squeeze(1)))
        out, _ = dsa.sparse_mla_attention(q, keys[:, None], near[:, None], self.dim**-0.5, self.dim, self.attn_sink)
        return out

    def _casts_results(self, rope: Angles) -> bool:
        """Whether a prompt's attention casts its results for wo_a: of sizes for which that is faster, and the kernel is
        made."""
        return self.n_heads > FEW_HEADS and self.dim == 512 and rope[0].shape[1] == 32 and self._gives_cast()

    def _gives_cast(self) -> bool:
        """Whether wo_a gets its input in FP8: FP8 weights, for inference, where nobody else looks at it."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or watched(self.wo_a):
            return False
        return type(self.wo_a.matrices) is BlockFP8Linear

    def _joins_rope(self, rope: Angles) -> bool:
        """Whether heads are of a size whose rope is one kernel with the norm in front of it and the cast behind it."""
        return self.dim <= MOST_CHANNELS and self.dim % VECTOR == 0 and 2 * rope[0].shape[1] % VECTOR == 0

    def _project(self, out: torch.Tensor, rope: Angles, batch: TokenBatch) -> torch.Tensor:
        """y of attention's results [T, heads, dim]."""
        back = RopeAngles.of(rope).back
        if self.dim % BLOCK == 0 and self._joins_rope(rope) and self._gives_cast():
            cast = dsa.rotary_cast_to_fp8(out, *back, self.o_groups, self.wo_a.matrices.use_ue8m0)
            return self.wo_a.multiply(cast, self.wo_b, batch, out.dtype)
        out = turn(out, *back, interleaved=True, dims="last")
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
        projected: Projections,
        rope: Angles,
        entry_rope: Angles | None,
        batch: TokenBatch,
        cache: CompressedLayerCache | None,
        rows: Rows,
        queries: Rows,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(all entries packed [N, dim], the rows int32 [T, K] of those that each of `queries` attends to, `counts` of
        them or up to the first -1)."""
        if self.compressor is None:
            return None, None
        entries = batch.entries(self.compressor.ratio)
        if cache is None:
            compressed = self.compressor.entries(*projected.entries, *entry_rope, batch).to(x.dtype)
        else:
            self.compressor.store(*projected.entries, *entry_rope, batch, cache.entries)
        dense, topk_indices = True, None
        if self.indexer is not None:
            dense = entries.most <= self.indexer.top_k
            topk_indices = self._select(x, projected, rope, entry_rope, batch, cache, rows, store_only=dense)
        if cache is not None:  # behind the selection: of a long context both take memory
            compressed = dsa.read_kv_cache(cache.entries.pages, entries.all_slots, dtype=x.dtype)
        if dense:
            return compressed, queries.own_kept(entries.rows)
        topk_indices = moved(topk_indices, rows if projected.given else ALL_ROWS, queries)
        return compressed, packing.packed_rows(topk_indices, queries.own_kept(entries.starts), len(batch.key_lens))

    def selectable(self, batch: TokenBatch) -> EntryView:
        """The keys among which the indexer selects: entries."""
        return batch.entries(self.compressor.ratio)

    def _count_keys(self, batch: TokenBatch, entries: torch.Tensor | None, queries: Rows = ALL_ROWS) -> None:
        """entries int32 [T, K], or [B, next_n, K] of a decoding pass: those that each of `queries` reads beside its
        window, -1 where there are fewer."""
        if self.key_counter is None:
            return
        context = batch.visible_keys
        read = dense = context.clamp(max=self.window)
        if entries is not None:
            read = read + queries.gather((entries >= 0).flatten(0, -2).sum(-1))[0]
            dense = dense + batch.entries(self.compressor.ratio).visible_keys
        self.key_counter.add(read, dense, context)

    def _decode(
        self,
        x: torch.Tensor,
        rope: Angles,
        entry_rope: Angles | None,
        batch: TokenBatch,
        cache: CompressedLayerCache,
        cast: joint_linear.Cast | None,
        rows: Rows,
        queries: Rows,
    ) -> torch.Tensor:
        windows, norm = self._windows(batch, cache), self.kv_norm
        slots_of_keys, slots_of_windows = windows.slots, windows.decode_slots
        entries = None if self.compressor is None else batch.entries(self.compressor.ratio)
        given, selects = self._gives_products(), self.indexer is not None
        # What compressors make of x goes beside the latents: behind these the product of the queries keeps all
        # multiprocessors. The branch that selects comes last, and joins this one.
        with side_stream(x):
            *products, weights = self._entry_products(x, given and selects, given and selects)
            if self.compressor is not None:
                self.compressor.store(*products[:2], *entry_rope, batch, cache.entries)
            if given and selects:
                self.indexer.compressor.store(*products[2:], *entry_rope, batch, cache.index_entries)
        latents, kv = self._latents(x, cast, given and selects)
        projected = Projections.of(latents, kv, products, weights, given, selects)
        slots, extra = None, {}
        with side_stream(x, *projected.read()) as branch:
            dsa.write_mla_cache(kv, norm.weight.float(), *rope, cache.window, slots_of_keys, eps=norm.eps)
            if self.indexer is not None:
                stored = {"stored": True} if given else {}
                slots = self._select(x, projected, rope, entry_rope, batch, cache, rows, paged_slots=True, **stored)
                slots = slots.unflatten(0, (-1, batch.next_n))
            elif self.compressor is not None:
                slots = entries.slot_table
        q = self._queries(latents, rope, rows, queries)
        branch.join()
        if self.compressor is not None:
            extra = {"extra_k_cache": cache.entries.pages, "extra_indices_in_kvcache": slots}
            extra["extra_topk_length"] = entries.most_selected(slots.shape[2])
        self._count_keys(batch, slots)
        # On a GPU bytes are attended to in bf16, whatever the model's dtype: they have 4 bits.
        dtype = torch.bfloat16 if cache.is_fp8 and q.is_cuda else q.dtype
        # Where the lengths of a sequence's last token count for its others, the second list's place, which decides in
        # what order it is summed, follows from how many tokens there are.
        lengths = None if is_batch_invariant() else batch.most_selected(self.window)
        out, _ = dsa.flash_mla_with_kvcache(
            *(q.unflatten(0, (-1, batch.next_n)).to(dtype), cache.window, None, None, self.dim, None),
            softmax_scale=self.dim**-0.5,
            is_fp8_kvcache=cache.is_fp8,
            indices=slots_of_windows,
            topk_length=lengths,
            attn_sink=self.attn_sink,
            **extra,
            **of_attention(),
        )
        return self._project(out.flatten(0, 1).to(q.dtype), rope, batch)


def _listed(rows: torch.Tensor | None, counts: torch.Tensor | None) -> torch.Tensor | None:
    """rows [T, K] with -1 behind the first `counts` [T] of each token."""
    if rows is None or counts is None:
        return rows
    columns = torch.arange(rows.shape[1], dtype=torch.int32, device=rows.device)
    return torch.where(columns < counts[:, None], rows, -1)
