"""`CompressedAttention` for inference, with a paged cache and fused products, on one or several ranks."""

from collections.abc import Callable
from typing import NamedTuple, Self

import torch

import dsa
from dsa_layers.batch import packing
from dsa_layers.batch.placement import WHOLE, redistribute
from dsa_layers.batch.token_batch import TokenBatch, check_pages, check_tokens
from dsa_layers.batch.views import WindowView
from dsa_layers.cache.compressed_kv_cache import CompressedLayerCache, EntryCache
from dsa_layers.engine import joint_linear
from dsa_layers.engine.fp32_product import is_batch_invariant, of_attention
from dsa_layers.engine.joint_linear import Cast, Layer, grouped_products, grouped_products_of_cast, norm_and_cast
from dsa_layers.engine.layer_pass import EntryPass, check_inference
from dsa_layers.engine.paged_indexer import PagedCompressedIndexer, PagedCompressor, Products
from dsa_layers.engine.side_stream import side_stream
from dsa_layers.layers.compressed_attention import Angles, CompressedAttention
from dsa_layers.layers.linear import BLOCK, BlockFP8Linear, FP32Linear
from dsa_layers.layers.rope import RopeAngles
from dsa_layers.parallel.placement import placement_of
from dsa_layers.parallel.ranks import ALONE, Ranks

# In every dtype, the kernel for norm and rope supports heads with a multiple of VECTOR channels, up to MOST_CHANNELS.
# This kernel and the kernel for rope and cast both require a multiple of VECTOR rope channels.
MOST_CHANNELS, VECTOR = 512, 8
FEW_HEADS = 32  # prefills with at most FEW_HEADS heads use another kernel, which cannot cast its results to FP8


class QueryLatents(NamedTuple):
    """The latents of the queries.

    values  [T, q_lora_rank], after the norm
    cast    `values` in FP8 with scales, from `norm_and_cast`, or None
    """

    values: torch.Tensor
    cast: Cast | None


class Projections(NamedTuple):
    """Projections of x. If the rows are sharded, `latents` and `index_weights` have this rank's rows; the other fields
    have all rows.

    latents        latents of the queries
    keys           [T, dim]: keys of the tokens, before norm and rope
    entries        `Products` of the compressor; None without a compressor
    index_entries  `Products` of the indexer's compressor; None if the pass does not need them or `_shares_products` is
                   false
    index_weights  the indexer's `head_weights`, if one product computes them and all `Products` (`joint_fp32_layers`);
                   else None
    """

    latents: QueryLatents
    keys: torch.Tensor
    entries: Products | None
    index_entries: Products | None
    index_weights: torch.Tensor | None

    def tensors(self) -> list[torch.Tensor | None]:
        of_latents = [self.latents.values, *(self.latents.cast or ())]
        return [*of_latents, self.keys, *(self.entries or ()), *(self.index_entries or ()), self.index_weights]


class PagedCompressedAttention(CompressedAttention):
    """`CompressedAttention` for inference.

    forward(x, rope, entry_rope, batch, cache=None, cast=None) -> [T, hidden], without gradients.

    rope        cos and sin; a `RopeAngles` lets layers share the inverse rotation
    entry_rope  cos and sin at the positions `EntryView.positions`; None without a compressor
    batch       the new tokens of all ranks. Without a cache, no sequence may have earlier tokens
    cast        x in FP8 with scales (`norm_and_cast`), for the layers in `joint_layers`; None if the caller has none

    ranks, part, part_of_ranks  see `PagedAttention`. If the layer has a `part` and the rows are sharded, each rank
                                computes all heads for its local rows. Otherwise it computes its heads for all rows
    """

    ranks: Ranks = ALONE
    part: Self | None = None
    part_of_ranks: Ranks | None = None

    def forward(
        self,
        x: torch.Tensor,
        rope: Angles,
        entry_rope: Angles | None,
        batch: TokenBatch,
        cache: CompressedLayerCache | None = None,
        *,
        cast: Cast | None = None,
    ) -> torch.Tensor:
        self.check_pass(x, batch)
        check_inference(x, batch, cache, CompressedLayerCache)
        if cache is not None:
            if self.compressor is not None:
                _check_entries("entries", cache.entries, self.compressor.ratio, batch)
            if self.indexer is not None:
                _check_entries("index_entries", cache.index_entries, self.indexer.compressor.ratio, batch)
        step = EntryPass(batch, rope, cache, placement_of(batch, self.ranks), entry_angles=entry_rope)
        check_tokens(x, step.placement.local_cached(batch.positions))
        with torch.no_grad():
            if self.part is not None and step.placement.sharded:
                step.queries = step.placement
                return self._run(x, cast, step)
            return step.placement.reduce((self.part or self)._run(x, cast, step))

    def joint_layers(self) -> tuple[Layer, ...]:
        """Return the layers that can multiply x in one product (`join`)."""
        return self.wq_a, self.wkv

    def joint_fp32_layers(self) -> tuple[FP32Linear, ...]:
        """Return the fp32 layers of the compressor and of the indexer, which can multiply x in one product (`join`).
        Return () if there is no `PagedCompressor` or no `PagedCompressedIndexer`.

        If the indexer's n_heads is not a multiple of 4, leave out its `weights_proj`. With it, the rows of the results
        would not begin at multiples of 16 bytes, as the kernel of `dsa.write_compressed_kv` requires.
        """
        if not isinstance(self.indexer, PagedCompressedIndexer) or not isinstance(self.compressor, PagedCompressor):
            return ()
        keys = *self.compressor.joint_layers(), *self.indexer.compressor.joint_layers()
        return keys if self.indexer.n_heads % 4 else (*keys, self.indexer.weights_proj)

    def _run(self, x: torch.Tensor, cast: Cast | None, step: EntryPass) -> torch.Tensor:
        """Return y for the rows of `step.queries`."""
        if step.decode:
            return self._decode(x, cast, step)
        latents, projecting = self._begin_projections(x, cast, step)
        q = self._queries(latents, step)  # overlaps with the exchange of rows between ranks
        projected = projecting()
        del latents, projecting  # free the rows of this rank that `projecting` holds
        keys = self._token_keys(projected.keys, step)
        entries = self._entries(x, projected, step)
        del projected  # free the fp32 products of all rows
        return self._prefill(q, keys, *entries, step)

    def _selects(self, batch: TokenBatch) -> bool:
        """Return whether the layer has an indexer and some sequence may have more than top_k entries."""
        return self.indexer is not None and self.selectable(batch).max_key_len > self.indexer.top_k

    @property
    def _shares_products(self) -> bool:
        """Whether this layer computes its indexer's projections, so that both share products and casts."""
        return isinstance(self.indexer, PagedCompressedIndexer)

    def _begin_projections(
        self, x: torch.Tensor, cast: Cast | None, step: EntryPass
    ) -> tuple[QueryLatents, Callable[[], Projections]]:
        """Return the queries' latents, and a function that returns all projections.

        If x is sharded, this method starts to exchange the keys and the compressors' products between ranks, and the
        returned function waits for this exchange.
        """
        selects = self._selects(step.batch)
        latents, kv = self._latents(x, cast, selects and self._shares_products)
        # If the pass selects nothing, the indexer still writes its keys to the cache.
        indexes = self._shares_products and (selects or step.cache is not None)
        entries, of_index, weights = self._products(x, indexes, selects and self._shares_products)
        gathering = step.placement.start_all_gather(kv, *(entries or ()), *(of_index or ()))

        def end() -> Projections:
            keys, *products = gathering()
            return Projections(latents, keys, tuple(products[:2]) or None, tuple(products[2:]) or None, weights)

        return latents, end

    def _latents(self, x: torch.Tensor, cast: Cast | None, selects: bool) -> tuple[QueryLatents, torch.Tensor]:
        """Return the queries' latents and wkv(x). selects: whether the indexer also reads the latents and the cast."""
        qr, kv = joint_linear.multiply(x, *self.joint_layers(), cast=cast)
        readers = (self.wq_b, self.indexer.wq_b) if selects else (self.wq_b,)
        _, qr, cast = norm_and_cast(self.q_norm, qr, readers)
        return QueryLatents(qr, cast), kv

    def _products(
        self, x: torch.Tensor, indexes: bool, weighs: bool
    ) -> tuple[Products | None, Products | None, torch.Tensor | None]:
        """Return (entries, index_entries, index_weights) of `Projections`.

        indexes  whether to compute the products of the indexer's compressor
        weighs   with `indexes`, whether to also compute index_weights if one product computes them and all `Products`
        """
        if self.compressor is None:
            return None, None, None
        if not indexes:
            return self.compressor.project(x), None, None
        layers = self.joint_fp32_layers()
        found = joint_linear.multiply_as_one(x, *(layers if weighs else layers[:4]))
        if found is None:
            return self.compressor.project(x), self.indexer.compressor.project(x), None
        return found[:2], found[2:4], found[4] if len(found) > 4 else None

    def _queries(self, latents: QueryLatents, step: EntryPass) -> torch.Tensor:
        """Return q [T, heads, dim] for the rows of `step.queries`, after the norm and rope."""
        q = joint_linear.multiply_gathered(latents.values, self.wq_b, latents.cast, step.gathered)
        q = q.unflatten(-1, (self.n_heads, self.dim))
        if self._joins_rope(step.angles):
            return dsa.rms_norm_rotary(q, None, *step.query_angles, self.eps)
        return _rotate_in_place(dsa.rms_norm(q, None, self.eps), step.query_angles)

    def _pick(self, x: torch.Tensor, projected: Projections, step: EntryPass) -> torch.Tensor:
        """Return the indices of the entries that the indexer selects for the rows of `step.queries`, or their cache
        slots if `step.in_pages`.

        If there is a cache, also write the index keys to it, unless `_shares_products`: then the caller has already
        written them.
        """
        cache, latents, indexer = step.cache, projected.latents, self.indexer
        if self._shares_products:
            (q,) = joint_linear.multiply(latents.values, indexer.wq_b, cast=latents.cast)
            weights = projected.index_weights
            weights = indexer.head_weights(x) if weights is None else weights
            picked = indexer.pick(q, projected.index_entries, weights, step, step.placement)
            return redistribute(picked, step.placement, step.queries)
        qr = latents.values
        if step.placement.sharded:
            x, qr = step.placement.all_gather(x, qr)
        if cache is not None:
            indexer.store(x, step.entry_angles, step.batch, cache)
        picked = indexer.select(x, qr, step.angles, step.batch, cache, entry_rope=step.entry_angles)
        if step.in_pages:
            picked = self.selectable(step.batch).slots_of(picked)
        return redistribute(picked, WHOLE, step.queries)

    def _prefill(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        compressed: torch.Tensor | None,
        rows: torch.Tensor | None,
        step: EntryPass,
    ) -> torch.Tensor:
        """Return y for the queries q. A query attends to the keys in its window and to compressed entries.

        keys              the result of `_token_keys`
        compressed, rows  the result of `_entries`
        """
        batch, queries, angles = step.batch, step.queries, step.query_angles
        windows = self._windows(step)
        # Pass the indices of the keys in each query's window. Without them, the op would assume that the queries are
        # the last tokens of their sequences, but this rank's queries may not be.
        near = queries.local_cached(windows.indices)
        packed = (q, keys[:, None], queries.local_bounds(batch.cu_query_lens), windows.cu_keys, self.window)
        if compressed is None or len(compressed) == 0:
            compressed = rows = counts = None
        else:
            compressed = compressed[:, None]
            counts = batch.entries(self.compressor.ratio).selected_counts(rows.shape[1])
            counts = None if counts is None else queries.local_cached(counts)
        scale = self.dim**-0.5
        if self._casts_results(step.angles):
            cast = dsa.window_attention_cast_to_fp8(
                *(*packed, compressed, rows, *angles, self.o_groups, scale, self.attn_sink),
                topk_length=counts,
                window_indices=near,
                use_ue8m0=self.wo_a.matrices.use_ue8m0,
            )
            return grouped_products_of_cast(cast, self.wo_a, self.wo_b, batch, q.dtype)
        if compressed is None:
            out, _ = dsa.sliding_window_attention(*packed, scale, self.dim, self.attn_sink, indices=near)
        else:
            softmax = (scale, self.dim, self.attn_sink)
            out, _ = dsa.window_sparse_attention(
                *(*packed, compressed, rows, *softmax), topk_length=counts, window_indices=near
            )
        return self._project(out, angles, batch)

    def _casts_results(self, rope: Angles) -> bool:
        """Return whether a prefill's attention casts its results to FP8 for wo_a. The kernel that casts supports heads
        of 512 channels, 64 of them with rope."""
        takes = self.n_heads > FEW_HEADS and self.dim == 512 and rope[0].shape[1] == 32
        return takes and type(self.wo_a.matrices) is BlockFP8Linear

    def _joins_rope(self, rope: Angles) -> bool:
        """Return whether the kernel for norm and rope and the kernel for rope and cast support this size of a head."""
        return self.dim <= MOST_CHANNELS and self.dim % VECTOR == 0 and 2 * rope[0].shape[1] % VECTOR == 0

    def _project(self, out: torch.Tensor, rope: Angles, batch: TokenBatch) -> torch.Tensor:
        """Apply the inverse rope and the output projections to attention's results `out` [T, heads, dim].

        rope: cos and sin for the queries.
        """
        back, matrices = RopeAngles.of(rope).back, self.wo_a.matrices
        if self.dim % BLOCK == 0 and self._joins_rope(rope) and type(matrices) is BlockFP8Linear:
            cast = dsa.rotary_cast_to_fp8(out, *back, self.o_groups, matrices.use_ue8m0)
            return grouped_products_of_cast(cast, self.wo_a, self.wo_b, batch, out.dtype)
        out = _rotate_in_place(out, back)
        return grouped_products(out.flatten(1).unflatten(-1, (self.o_groups, -1)), self.wo_a, self.wo_b, batch)

    def _windows(self, step: EntryPass) -> WindowView:
        return step.batch.windows(self.window, self.window if step.cache is None else step.cache.window.shape[1])

    def _token_keys(self, kv: torch.Tensor, step: EntryPass) -> torch.Tensor:
        """Return the keys of all tokens in the windows of the new tokens, sorted by `WindowView.order`.

        kv: wkv(x) of the new tokens. If there is a cache, also write their keys to the sequences' rings (`WindowView`).
        """
        cache = step.cache
        if cache is None:
            return _rotate_in_place(self.kv_norm(kv), step.angles)
        windows, norm = self._windows(step), self.kv_norm
        earlier = None
        if any(windows.earlier_lens):
            earlier = dsa.read_kv_cache(cache.window, windows.earlier_slots, dtype=kv.dtype)
        # If the rings are FP8, the op also rounds `rows` to FP8. So a key has the same value in this pass and in later
        # passes.
        rows = torch.empty_like(kv)
        dsa.write_mla_cache(kv, norm.weight.float(), *step.angles, cache.window, windows.slots, eps=norm.eps, out=rows)
        if earlier is None:
            return rows
        keys = torch.cat((earlier, rows))
        return keys if windows.in_order else keys[windows.order]

    def _entries(
        self, x: torch.Tensor, projected: Projections, step: EntryPass
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return (entries, rows), or (None, None) without a compressor.

        entries  [N, dim]: all compressed entries of all sequences, packed
        rows     int32 [T, K]: for each query in `step.queries`, the rows of `entries` that the query attends to. K is
                 top_k if the indexer selects, else `EntryView.max_key_len`. If a query may see n < K entries, only its
                 first n columns count

        If there is a cache, also write the new entries and index entries to it.
        """
        if self.compressor is None:
            return None, None
        batch, cache = step.batch, step.cache
        entries, selects = batch.entries(self.compressor.ratio), self._selects(batch)
        if cache is None:
            compressed = self.compressor.entries(*projected.entries, *step.entry_angles, batch).to(x.dtype)
        else:
            self.compressor.store(projected.entries, step, cache.entries)
            if self._shares_products:
                self.indexer.compressor.store(projected.index_entries, step, cache.index_entries)
            elif self.indexer is not None and not selects:
                (x_all,) = step.placement.all_gather(x)
                self.indexer.store(x_all, step.entry_angles, batch, cache)
        topk_indices = self._pick(x, projected, step) if selects else None
        if cache is not None:  # read the entries only after the selection: both need much memory in a long context
            compressed = dsa.read_kv_cache(cache.entries.pages, entries.key_slots, dtype=x.dtype)
        if topk_indices is None:
            return compressed, step.queries.local_cached(entries.rows)
        starts = step.queries.local_cached(entries.key_starts)
        return compressed, packing.packed_rows(topk_indices, starts, len(batch.key_lens))

    def _decode(self, x: torch.Tensor, cast: Cast | None, step: EntryPass) -> torch.Tensor:
        batch, cache, step.in_pages = step.batch, step.cache, True
        windows, norm, shares = self._windows(step), self.kv_norm, self._shares_products
        slots_of_keys, slots_of_windows = windows.slots, windows.decode_slots
        entries = None if self.compressor is None else batch.entries(self.compressor.ratio)
        # In a CUDA graph, run the compressors' products on the second stream while the first stream computes the
        # latents. `side.join()` waits for everything on the second stream, so it waits for these products too.
        with side_stream(x):
            products, of_index, weights = self._products(x, shares, shares)
            if self.compressor is not None:
                self.compressor.store(products, step, cache.entries)
            if shares:
                self.indexer.compressor.store(of_index, step, cache.index_entries)
        latents, kv = self._latents(x, cast, shares)
        projected = Projections(latents, kv, products, of_index, weights)
        slots, extra = None, {}
        with side_stream(x, *projected.tensors()) as side:
            dsa.write_mla_cache(kv, norm.weight.float(), *step.angles, cache.window, slots_of_keys, eps=norm.eps)
            if self.indexer is not None:
                slots = self._pick(x, projected, step).unflatten(0, (-1, batch.next_n))
            elif self.compressor is not None:
                slots = entries.slot_table
        q = self._queries(latents, step)
        side.join()
        if self.compressor is not None:
            extra = {"extra_k_cache": cache.entries.pages, "extra_indices_in_kvcache": slots}
            extra["extra_topk_length"] = entries.most_selected(slots.shape[2])
        # On a GPU, the kernel for FP8 pages accepts only bf16 queries.
        dtype = torch.bfloat16 if cache.is_fp8 and q.is_cuda else q.dtype
        # topk_length is the number of window keys of a sequence's last new token. The op puts the entries after that
        # many window keys, so a draft could change the order of another token's sums. Batch-invariant passes therefore
        # pass no topk_length.
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
        return self._project(out.flatten(0, 1).to(q.dtype), step.angles, batch)


def _check_entries(name: str, entries: EntryCache | None, ratio: int, batch: TokenBatch) -> None:
    """Raise ValueError if `entries` is None, or if the batch's pages have another size than those of `entries`.

    name: the cache's attribute, for the message. ratio: tokens per entry.
    """
    if entries is None:
        raise ValueError(f"cache: must have {name} where the layer compresses tokens, got None")
    check_pages(batch, entries.pages.shape[1] * ratio)


def _rotate_in_place(x: torch.Tensor, rope: Angles) -> torch.Tensor:
    """Apply rope to the last channels of x in place, and return x."""
    return dsa.apply_rotary(x, *rope, interleaved=True, dims="last", out=x)
