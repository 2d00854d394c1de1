"""`DSAAttention` for inference, with a paged cache and fused products, on one or several ranks."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch

import dsa
from dsa.kernels.mla.limits import GROUP_SIZES, HEAD_DIM, HEAD_DIM_V
from dsa.runtime import backends
from dsa_layers.batch import packing
from dsa_layers.batch.placement import WHOLE, redistribute
from dsa_layers.batch.selected import CountedIn, Selected
from dsa_layers.batch.token_batch import TokenBatch, check_pages, check_tokens
from dsa_layers.cache.kv_cache import LatentStore, LayerCache, read_latents
from dsa_layers.engine import joint_linear
from dsa_layers.engine.attention_form import Communication, HeadSizes, multi_head_is_faster, stored_up_projection
from dsa_layers.engine.fp32_product import is_batch_invariant, of_attention
from dsa_layers.engine.joint_linear import Cast, Layer, norm_and_cast
from dsa_layers.engine.layer_pass import LayerPass, check_inference
from dsa_layers.engine.paged_indexer import PagedIndexer
from dsa_layers.engine.side_stream import SideStream, side_stream
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.causal_attention import causal_attention
from dsa_layers.layers.linear import BLOCK, BlockFP8Linear
from dsa_layers.parallel.placement import placement_of
from dsa_layers.parallel.ranks import ALONE, Ranks

MOST_CHANNELS = 256  # the most channels of a head that `dsa.mha_varlen_fwd` supports on a GPU
# In the absorbed form, a sparse prefill first converts the keys in FP8 pages to x's dtype, if they then take at most
# `most_read` bytes. Otherwise attention reads the FP8 pages, and converts a key for every query that selects it.
# MOST_READ is 174762 keys of V3.2 in 16 bits. Measured with 64 heads: converting first takes 0.83 times as long as
# reading FP8 pages for 131072 keys, and 1.29 times for 262144 keys.
MOST_READ = 192 << 20


def most_read(heads: int) -> int:
    """Return the limit on the bytes of converted keys for this number of heads.

    With few heads, only the kernel for 16-bit keys can group queries that share keys. So the limit is twice as large.
    The factor 2 is derived, not measured (docs/explanation/kernels.md, "Sparse MLA, FP8 caches").
    """
    return 2 * MOST_READ if heads <= max(GROUP_SIZES) else MOST_READ


@dataclass
class AttentionPass(LayerPass):
    """A `LayerPass` with the form of attention.

    sparse      whether queries attend to selected keys only
    multi_head  whether attention uses the multi-head form, else the absorbed form (attention_form.py)
    store       in a pass without a cache, the latents that layers share; None if no layer shares this layer's latents
    """

    sparse: bool = False
    multi_head: bool = False
    store: LatentStore | None = None

    @property
    def counted_in(self) -> CountedIn:
        """The unit of the indices of selected keys: cache slots, positions in the sequence, or packed rows."""
        if self.in_pages:
            return "slots"
        return "positions" if self.multi_head else "rows"


class Latents(NamedTuple):
    """Projections of x. If the rows are sharded, `keys` and `index_keys` have all rows, the others this rank's rows.

    queries        [T, q_lora_rank]: latents of the queries, after the norm; x if q_lora_rank is None
    unnormed       `queries` before the norm
    cast           `queries` in FP8 with scales, or None (`norm_and_cast`)
    keys           [T, latent + rope]: latents and rope channels of the keys, before norm and rope; None in a layer that
                   shares latents
    index_keys     wk(x) of a `PagedIndexer`; None if the layer has no such indexer or the pass needs no index keys
    index_weights  `head_weights` of the indexer if `_latents` has also written the index keys to the cache; else None
    """

    queries: torch.Tensor
    unnormed: torch.Tensor
    cast: Cast | None
    keys: torch.Tensor | None
    index_keys: torch.Tensor | None
    index_weights: torch.Tensor | None


class PagedAttention(DSAAttention):
    """`DSAAttention` for inference.

    A pass is sparse if its queries attend to selected keys only, else dense. A dense prefill uses the multi-head form
    (attention_form.py). A sparse prefill uses it if a kernel supports it and it is faster. Other sparse prefills and
    decoding use the absorbed form. In the multi-head form, an infinity or NaN in a key's value can reach queries of the
    sequence that do not attend to the key.

    forward(x, cos, sin, batch, cache=None, selected=None, cast=None) -> ([T, hidden], `Selected`), without gradients.

    batch     the new tokens of all ranks. Without a cache, no sequence may have earlier tokens
    selected  the `Selected` that the previous layer returned, for a layer without an indexer
    cast      x in FP8 with scales (`norm_and_cast`), for `joint_layers`; None if the caller has no cast

    With a cache, the layer writes the new tokens' keys, and its indexer's keys, to the pages. Attention uses the keys
    as the pages store them, so FP8 pages round the keys.

    ranks          the ranks that compute the layer. With several ranks, x and the result are this rank's local rows
                   (`placement_of`)
    part           a copy of this layer with this rank's heads (`rank_part`), if this layer has the heads of all ranks
    part_of_ranks  the ranks that have such copies

    With several ranks, a rank computes some heads for all rows, and the ranks sum the results. If the layer has a
    `part` and the rows are sharded, the absorbed form instead computes all heads for the rank's local rows.
    """

    ranks: Ranks = ALONE
    part: Self | None = None
    part_of_ranks: Ranks | None = None

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: TokenBatch,
        cache: LayerCache | LatentStore | None = None,
        selected: Selected | None = None,
        *,
        cast: Cast | None = None,
    ) -> tuple[torch.Tensor, Selected]:
        self.check_pass(x, batch)
        store = cache if isinstance(cache, LatentStore) else None
        cache = None if store is not None else cache
        check_inference(x, batch, cache, LayerCache)
        if self.indexer is None and selected is None:
            raise ValueError("selected: a layer without an indexer needs what a layer before it selected, got None")
        if cache is not None:
            check_pages(batch, cache.page_size)
        with torch.no_grad():
            step = AttentionPass(batch, (cos, sin), cache, placement_of(batch, self.ranks), store=store)
            check_tokens(x, step.placement.local_cached(batch.positions))
            return self._pass(x, cast, step, selected)

    def _pass(
        self, x: torch.Tensor, cast: Cast | None, step: AttentionPass, selected: Selected | None
    ) -> tuple[torch.Tensor, Selected]:
        self._choose_form(step, x, selected)
        if self.part is not None and step.placement.sharded and not step.multi_head:
            step.queries = step.placement
            return self._run(x, cast, step, selected)
        y, selected = (self.part or self)._run(x, cast, step, selected)
        return step.placement.reduce(y), selected

    def joint_layers(self) -> tuple[Layer, ...]:
        """Return the layers that can multiply x in one product (`join`). In V3.2, kv_a_proj_with_mqa has 576 rows. It
        is last because only the last layer may end inside a block of 128 rows."""
        own = (self.indexer.wk,) if isinstance(self.indexer, PagedIndexer) else ()
        return own + self._latent_layers()

    def _latent_layers(self) -> tuple[Layer, ...]:
        """Return the projections of x to latents that this layer has."""
        return tuple(layer for layer in (self.q_a_proj, self.kv_a_proj_with_mqa) if layer is not None)

    def _choose_form(self, step: AttentionPass, x: torch.Tensor, selected: Selected | None) -> None:
        batch, cache = step.batch, step.cache
        if self.indexer is None:
            step.sparse = selected.topk_indices is not None
        else:
            # Dense decoding has no kernel for FP8 pages, nor for other sizes than 512 latent and 64 rope channels.
            # Batch-invariant decoding is always sparse too, so that the choice does not depend on other sequences.
            always = step.decode and (cache.latent_is_fp8 or is_batch_invariant() or self._lacks_dense_decode(x))
            step.sparse = always or batch.max_key_len > self.indexer.top_k
        step.multi_head = not step.decode and (not step.sparse or self._takes_multi_head_form(x, step, selected))
        # The multi-head form reads packed keys.
        step.in_pages = step.decode or (not step.multi_head and cache is not None and self._stay_in_pages(x, step))

    def _run(
        self, x: torch.Tensor, cast: Cast | None, step: AttentionPass, selected: Selected | None
    ) -> tuple[torch.Tensor, Selected]:
        """Return the result for the rows of `step.queries`, and the selected keys."""
        batch, cache, queries = step.batch, step.cache, step.queries
        latents = self._latents(x, cast, step)
        kv = self._keys(latents.keys, step)
        side = SideStream()
        if self.indexer is None:
            topk_indices = selected.indices(step.counted_in, batch, queries)
            bits = selected.bits.to(x.device) if step.sparse and step.multi_head else None
        else:
            # The selection and the queries' projections are independent, so a CUDA graph runs them on two streams.
            reads = latents.queries, *(latents.cast or ()), latents.index_keys, latents.index_weights
            with side_stream(x, *reads) as side:
                topk_indices = self._pick(x, latents, step)
                packed = step.sparse and step.multi_head
                bits = dsa.selection_bits(topk_indices, None, batch.max_key_len) if packed else None
            selected = Selected(topk_indices, batch, step.counted_in, queries, bits)
        q, gate = self._project_queries(x, latents, step)
        q_nope, q_pe = q.split((self.nope_dim, self.rope_dim), -1)
        stored = stored_up_projection(self, q) if step.decode else None
        if stored is not None:
            q = dsa.mla_absorb_queries(q_nope, q_pe, *step.query_angles, stored)
        elif not step.multi_head:
            w_uk, w_uv = self._up_projections(x.dtype)
            q = self._absorbed_queries(q_nope, q_pe, w_uk, step)
        side.join()
        if kv is None:  # read the keys only after the selection: both need much memory in a long context
            kv = self._stored_keys(step, x.dtype)
        if step.multi_head:
            return self._output(self._multi_head(q, kv, step, bits), gate), selected
        if step.decode:
            attended = self._decode(q, topk_indices, step)
        elif step.in_pages and cache.latent_is_fp8:
            attended = self._attend_to_bytes(q, topk_indices, step)
        else:
            arguments = (kv[:, None], topk_indices[:, None], self.softmax_scale, self.kv_lora_rank)
            counts = self._counts(topk_indices, step)
            options = {"topk_length": counts} | self._options()
            attended, *_ = dsa.flash_mla_sparse_fwd(q, *arguments, **options)
        if stored is not None:
            cast = dsa.mla_values_cast_to_fp8(attended, stored, self.v_dim, self.o_proj.use_ue8m0)
            return self.o_proj.multiply(cast, x.dtype), selected
        return self._output(by_head(attended, w_uv.mT), gate), selected

    def _latents(self, x: torch.Tensor, cast: Cast | None, step: AttentionPass) -> Latents:
        indexes = (step.sparse or step.cache is not None) and isinstance(self.indexer, PagedIndexer)
        weights = None
        # In a CUDA graph, run the kernels for the indexer's weights and keys on the second stream. `_run` launches the
        # selection on this stream later, so its `side.join()` waits for these kernels too.
        early = indexes and step.decode and step.sparse
        if early:
            _ = step.batch.slots  # compute `slots` before the second stream begins, because both streams read it
            with side_stream(x):
                weights = self.indexer.head_weights(x)
        layers = self.joint_layers() if indexes else self._latent_layers()
        made = [*(joint_linear.multiply(x, *layers, cast=cast) if layers else ())]
        keys = [made.pop(0)] if indexes else []
        if early:
            with side_stream(x, *keys):
                self.indexer.write(*keys, step)
        qr = q_latent = x
        if self.q_a_proj is not None:
            q_latent = made.pop(0)
            readers = (self.q_b_proj, self.indexer.wq_b) if indexes and step.sparse else (self.q_b_proj,)
            if self.gate == "queries":  # q_b_proj also reads the unnormed latents, so it cannot use the cast
                readers = readers[1:]
            _, qr, cast = norm_and_cast(self.q_a_layernorm, q_latent, readers)
        gathered = [*step.placement.all_gather(*made, *keys)]
        kv = self._key_inputs(gathered.pop(0)) if made else None
        return Latents(qr, q_latent, cast, kv, gathered[0] if gathered else None, weights)

    def _project_queries(
        self, x: torch.Tensor, latents: Latents, step: AttentionPass
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (q, gate) for the rows of `step.queries`: q [T, heads, nope + rope] before rope; gate [T, heads,
        v_dim] before its sigmoid, or None."""
        inputs, input_cast = latents.queries, latents.cast
        if self.gate == "queries":
            inputs, input_cast = torch.cat((inputs, latents.unnormed), -1), None
        q = joint_linear.multiply_gathered(inputs, self.q_b_proj, input_cast, step.gathered)
        q, gate = self.split_gate(q.unflatten(-1, (self.n_heads, -1)), step.query_positions)
        if self.gate_proj is not None:
            gate = joint_linear.multiply_gathered(x, self.gate_proj, None, step.gathered)
            gate = gate.unflatten(-1, (self.n_heads, -1))
        return q, gate

    def _pick(self, x: torch.Tensor, latents: Latents, step: AttentionPass) -> torch.Tensor | None:
        """Return the indices of the keys that the rows of `step.queries` attend to, in the unit `step.counted_in`; None
        if the pass is not sparse.

        If there is a cache, also write the index keys of the new tokens to it, unless `_latents` has written them.
        """
        if not step.sparse and step.cache is None:
            return None
        batch, qr = step.batch, latents.queries
        if latents.index_keys is not None:
            weights = latents.index_weights
            if weights is None and step.cache is not None:
                self.indexer.write(latents.index_keys, step)
            if not step.sparse:
                return None
            q = self.indexer.queries(qr, step.placement.local_cached(batch.positions), cast=latents.cast)
            weights = self.indexer.head_weights(x) if weights is None else weights
            topk_indices = self.indexer.pick(q, latents.index_keys, weights, step, step.placement)
            topk_indices = redistribute(topk_indices, step.placement, step.queries)
        else:
            if step.placement.sharded:
                x, qr = step.placement.all_gather(x, qr)
            if step.cache is not None:
                self.indexer.store(x, step.angles, batch, step.cache)
            if not step.sparse:
                return None
            topk_indices = self.indexer.select(x, qr, step.angles, batch, step.cache)
            if step.in_pages:
                topk_indices = batch.slots_of(topk_indices)
            topk_indices = redistribute(topk_indices, WHOLE, step.queries)
        if step.in_pages or step.multi_head:
            return topk_indices
        return packing.packed_rows(topk_indices, step.queries.local_cached(batch.key_starts), len(batch.key_lens))

    def _keys(self, kv: torch.Tensor | None, step: AttentionPass) -> torch.Tensor | None:
        """Return the result of `_store`; without a cache, all keys [T, latent + rope] after norm and rope. kv: `keys`
        of `Latents`."""
        if kv is None:
            if step.cache is not None:
                return None
            return read_latents(step.store, len(step.batch.positions), self.kv_lora_rank + self.rope_dim)
        if step.cache is not None:
            return self._store(kv, step)
        kv = self._norm_and_rotate(kv, step.angles)
        if step.store is not None:
            step.store.latents = kv
        return kv

    def _store(self, kv: torch.Tensor, step: AttentionPass) -> torch.Tensor | None:
        """Apply norm and rope to the new tokens' projections kv [T, latent + rope], and write the keys to the pages.

        If all keys are new, return them as the pages store them, [sum(key_lens), latent + rope] in kv's dtype, so that
        the pages need not be read back. Return None if a key is not new, attention reads the pages, or the pages have
        another float dtype than kv.
        """
        batch, cache, norm = step.batch, step.cache, self.kv_a_layernorm
        as_stored = cache.latent_is_fp8 or cache.latent.dtype == kv.dtype
        keep = not step.in_pages and as_stored and batch.query_lens == batch.key_lens
        pages = cache.latent, batch.slots
        if not self._has_latent_kernels():
            kv = self._norm_and_rotate(kv, step.angles)
            dsa.write_kv_cache(kv, *pages)
            return kv if keep else None
        rows = torch.empty_like(kv) if keep else None
        dsa.write_mla_cache(kv, norm.gain, *step.angles, *pages, eps=norm.eps, out=rows)
        return rows

    def _lacks_dense_decode(self, x: torch.Tensor) -> bool:
        return not self._has_latent_kernels() and backends.runs_kernel("flash_mla_with_kvcache", x)

    def _has_latent_kernels(self) -> bool:
        """Return whether a key has 512 latent and 64 rope channels, as in FP8 pages. For other sizes, sparse attention
        may have a kernel, but dense decoding and `dsa.write_mla_cache` have none."""
        return self.kv_lora_rank == HEAD_DIM_V and self.rope_dim == HEAD_DIM - HEAD_DIM_V

    def _stay_in_pages(self, x: torch.Tensor, step: AttentionPass) -> bool:
        """Return whether a sparse prefill in the absorbed form reads keys directly from the pages (see MOST_READ)."""
        if step.cache.latent.dtype == x.dtype:
            return True
        read = sum(step.batch.key_lens) * (self.kv_lora_rank + self.rope_dim) * x.itemsize
        heads = self.n_heads if self.part is None or step.placement.sharded else self.part.n_heads
        return step.cache.latent_is_fp8 and read > most_read(heads)

    def _stored_keys(self, step: AttentionPass, dtype: torch.dtype) -> torch.Tensor:
        """Return the keys that attention reads: if `step.in_pages`, a view of the pages with one row per slot; else all
        keys in `dtype`, packed, [sum(key_lens), latent + rope]."""
        latent = step.cache.latent
        if step.in_pages:
            return latent.view(-1, latent.shape[-1])
        return dsa.read_kv_cache(latent, step.batch.key_slots, dtype=dtype)

    def _counts(self, topk_indices: torch.Tensor, step: AttentionPass) -> torch.Tensor | None:
        """Return the number of valid columns of topk_indices per row; None if all columns of all rows are valid."""
        counts = step.batch.selected_counts(topk_indices.shape[1])
        return None if counts is None else step.queries.local_cached(counts)

    def _absorbed_queries(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, w_uk: torch.Tensor, step: AttentionPass
    ) -> torch.Tensor:
        """Return [T, heads, latent + rope]: q_nope W_UK, and q_pe after rope."""
        q = q_nope.new_empty(*q_nope.shape[:2], self.kv_lora_rank + self.rope_dim)
        by_head(q_nope, w_uk, q[..., : self.kv_lora_rank])
        dsa.apply_rotary(q_pe, *step.query_angles, interleaved=True, out=q[..., self.kv_lora_rank :])
        return q

    def _decode(self, q: torch.Tensor, topk_indices: torch.Tensor | None, step: AttentionPass) -> torch.Tensor:
        batch, cache = step.batch, step.cache
        # On a GPU, the kernel for FP8 pages accepts only bf16 queries.
        dtype = torch.bfloat16 if cache.latent_is_fp8 and q.is_cuda else q.dtype
        by_sequence = (-1, batch.next_n)
        options = {"softmax_scale": self.softmax_scale, "is_fp8_kvcache": cache.latent_is_fp8}
        if topk_indices is None:
            keys = batch.block_table, batch.key_lens_tensor, self.kv_lora_rank, batch.mla_schedule
            options["causal"] = batch.next_n > 1
        else:
            keys = None, None, self.kv_lora_rank, None
            options["indices"] = topk_indices.unflatten(0, by_sequence)
            options |= {"topk_length": batch.most_selected(topk_indices.shape[1])} | self._options()
        out, lse = dsa.flash_mla_with_kvcache(q.unflatten(0, by_sequence).to(dtype), cache.latent, *keys, **options)
        out = out.flatten(0, 1)
        if topk_indices is None and self.sinks is not None:
            out = self._apply_sinks(out, lse.transpose(1, 2).flatten(0, 1))
        return out.to(q.dtype)

    def _attend_to_bytes(self, q: torch.Tensor, topk_indices: torch.Tensor, step: AttentionPass) -> torch.Tensor:
        """Return [T, heads, latent]: attention of a prefill's queries to selected slots of FP8 pages. For the op, each
        query is a sequence of one token."""
        dtype = torch.bfloat16 if q.is_cuda else q.dtype
        counts = self._counts(topk_indices, step)
        options = {"indices": topk_indices[:, None], "topk_length": counts, "is_fp8_kvcache": True}
        options |= self._options()
        keys = step.cache.latent, None, None, self.kv_lora_rank, None
        out, _ = dsa.flash_mla_with_kvcache(q[:, None].to(dtype), *keys, softmax_scale=self.softmax_scale, **options)
        return out.squeeze(1).to(q.dtype)

    def _takes_multi_head_form(self, x: torch.Tensor, step: AttentionPass, selected: Selected | None) -> bool:
        """Return whether a sparse prefill uses the multi-head form.

        A layer without an indexer uses this form if the layer that selected the keys used it and a kernel exists.
        """
        if self.indexer is None:
            return selected.bits is not None and self._has_multi_head_kernel(x)
        heads = (self.part or self).n_heads
        sizes = HeadSizes(heads, self.nope_dim, self._rope_channels, self.v_dim, self.kv_lora_rank)
        lens = step.batch.query_lens, step.batch.key_lens
        return self._has_multi_head_kernel(x) and multi_head_is_faster(
            *lens, self.indexer.top_k, sizes, self._communication(x, step)
        )

    def _communication(self, x: torch.Tensor, step: AttentionPass) -> Communication | None:
        """Return the data that ranks exchange in the multi-head form but not in the absorbed form; None if both forms
        exchange the same data.

        These data are the latents of the queries, the results, and the indices of the selected keys. An indexer other
        than `PagedIndexer` selects for all rows on every rank in both forms, so its indices are not exchanged.
        """
        if self.part is None or not step.placement.sharded:
            return None
        channels = self.q_lora_rank or x.shape[1]
        latents = channels * x.element_size()
        if isinstance(self.q_b_proj, BlockFP8Linear):
            latents = channels + 4 * (channels // BLOCK)  # FP8 bytes, and fp32 scales
        picks = 4 * self.indexer.top_k if isinstance(self.indexer, PagedIndexer) else 0
        result = x.shape[1] * x.element_size()
        return Communication(self.ranks.size, latents + picks + result, 3 if picks else 2)

    @property
    def _rope_channels(self) -> int:
        """The rope channels of a head in the multi-head form."""
        return self.rope_dim if self.has_rope else 0

    def _has_multi_head_kernel(self, x: torch.Tensor) -> bool:
        """Return whether the kernel of `dsa.mha_varlen_fwd` supports the multi-head form of this layer. Without it,
        dense prefills compute this form in PyTorch, and sparse prefills use the absorbed form."""
        channels = max(self.nope_dim + self._rope_channels, self.v_dim)
        taken = x.dtype in (torch.bfloat16, torch.float16) and channels <= MOST_CHANNELS
        return taken and backends.runs_kernel("mha_varlen_fwd", x)

    def _multi_head(
        self, q: torch.Tensor, kv: torch.Tensor, step: AttentionPass, bits: torch.Tensor | None
    ) -> torch.Tensor:
        """Return causal attention per sequence in the multi-head form, [T, heads, v_dim].

        q     [T, heads, nope + rope], before rope; this method may overwrite it
        kv    [sum(key_lens), latent + rope]
        bits  a mask with one bit per query and key, set for selected keys (`dsa.selection_bits`); None to attend to all
              visible keys
        """
        batch = step.batch
        if bits is None and not self._has_multi_head_kernel(q):
            q = self._rotate(q, step.angles)
            return causal_attention(q, *self._keys_and_values(kv), batch, self.softmax_scale, self.sinks)
        latent, k_pe = kv.split((self.kv_lora_rank, self.rope_dim), -1)
        if self.has_rope:
            q_pe = q[..., self.nope_dim :]
            dsa.apply_rotary(q_pe, *step.angles, interleaved=True, out=q_pe)
        else:
            q, k_pe = q[..., : self.nope_dim], None  # without the rope channels, which are zero
        expanded = self.kv_b_proj(latent).unflatten(-1, (self.n_heads, self.nope_dim + self.v_dim))
        k_nope, v = expanded.split((self.nope_dim, self.v_dim), -1)
        sequences = batch.cu_query_lens, batch.cu_key_lens, batch.max_key_len
        # Queries with at most dense_keys visible keys attend to all of them and skip the bits. A layer without an
        # indexer does not know top_k, so all its queries read bits; the result is the same.
        dense_keys = 0 if self.indexer is None else self.indexer.top_k
        options = {"k_rope": k_pe, "selected": bits, "dense_keys": dense_keys, "attn_sink": self.sinks}
        out, _ = dsa.mha_varlen_fwd(q, k_nope, v, *sequences, self.softmax_scale, **options)
        return out

    def _output(self, values: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        by_channel = gate is not None and gate.shape == values.shape
        if not by_channel or type(self.o_proj) is not BlockFP8Linear:
            return super()._output(values, gate)
        cast = dsa.gate_cast_to_fp8(gate.flatten(1), values.flatten(1), self.o_proj.use_ue8m0, pad_scales=True)
        return self.o_proj.multiply(cast, values.dtype)

    def _options(self) -> dict[str, Any]:
        """Return the keyword arguments of sparse attention that batch invariance and sinks add."""
        return of_attention() | ({} if self.sinks is None else {"attn_sink": self.sinks})

    def _apply_sinks(self, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """Add the sinks to the softmax's denominator. out [T, heads, ...], lse [T, heads]: the result and the
        log-sum-exp without sinks."""
        return (out * (lse - self.sinks).sigmoid()[..., None]).to(out.dtype)


def by_head(x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply x [T, heads, I] by weights [heads, I, O] per head and return [T, heads, O]; write to `out` if given."""
    if out is None:
        out = x.new_empty(*x.shape[:2], weights.shape[-1])
    torch.bmm(x.transpose(0, 1), weights, out=out.transpose(0, 1))
    return out
