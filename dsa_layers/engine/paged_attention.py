"""`DSAAttention` for inference: over a paged cache, with fused products, on one rank or several."""

import inspect
from typing import NamedTuple

import torch

import dsa
import dsa.runtime.backends
from dsa.kernels.mla.limits import GROUP_SIZES
from dsa_layers.batch import packing
from dsa_layers.batch.rows import ALL_ROWS, Rows, moved
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.kv_cache import LayerCache
from dsa_layers.layers import joint_linear
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.attention_form import Communication, HeadSizes, multi_head_is_faster
from dsa_layers.layers.batch_invariance import is_batch_invariant, of_attention
from dsa_layers.layers.branch import Branch, side_stream
from dsa_layers.layers.causal_attention import causal_attention
from dsa_layers.layers.fp8_up_projection import stored_up_projection
from dsa_layers.layers.indexer import LightningIndexer
from dsa_layers.layers.linear import BLOCK, BlockFP8Linear, Linear
from dsa_layers.layers.norm_and_cast import norm_and_cast
from dsa_layers.layers.own_part import SplitByTokens
from dsa_layers.layers.pass_checks import check_cache, check_pages
from dsa_layers.layers.selecting_attention import KeyCounter
from dsa_layers.layers.selection import CountedIn, Selection

LIGHTNING_SELECT = inspect.unwrap(LightningIndexer.select)
MOST_CHANNELS = 256  # of a head, that `dsa.mha_varlen_fwd` takes on a GPU
# A sparse prefill first converts the latents in FP8 pages to 16 bits, if these take at most so many bytes (174762
# keys). Otherwise it attends to the FP8 bytes. Measured with 64 heads: converting first takes 0.83 times as long with
# 131072 keys, and 1.29 times with 262144.
MOST_READ = 192 << 20


def most_read(heads: int) -> int:
    """MOST_READ for a number of heads. It is twice as large for few heads, because the kernel for 16 bits then shares
    keys between neighbouring queries. Derived from measured parts, not measured (docs/explanation/kernels.md, "Sparse
    MLA, FP8 caches")."""
    return 2 * MOST_READ if heads <= max(GROUP_SIZES) else MOST_READ


class Form(NamedTuple):
    """How a pass attends. decode: to the cache. sparse: to selected keys. multi_head: with keys and values per head."""

    decode: bool
    sparse: bool
    multi_head: bool

    def counted_in(self, in_pages: bool) -> CountedIn:
        """What indices of selected keys count. in_pages: whether attention reads keys in the pages."""
        if in_pages:
            return "slots"
        return "positions" if self.multi_head else "rows"


class Latents(NamedTuple):
    """Projections of x.

    queries        [T, q_lora_rank]: latents of the queries
    cast           the same in FP8 with scales, for FP8 layers; else None
    keys           [T, latent + rope]: latents and rope channels of the keys, before the norm
    index_keys     wk(x) of the lightning indexer; None if its `select` computes them
    index_weights  its `head_weights`; None unless the index keys are already in the cache
    """

    queries: torch.Tensor
    cast: joint_linear.Cast | None
    keys: torch.Tensor
    index_keys: torch.Tensor | None
    index_weights: torch.Tensor | None

    def read(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors that `select` reads."""
        return self.queries, *(self.cast or ()), self.index_keys, self.index_weights


class PagedAttention(SplitByTokens, DSAAttention):
    """`DSAAttention` for inference.

    A prefill takes the multi-head form, with k_h and v_h of every head, while that is faster (attention_form.py). If
    it is sparse, a bit per key says which keys are selected, and NaN in a value reaches all queries of the sequence.
    Other sparse passes and decoding take the absorbed form, in which all heads attend to the latents.

    forward(x, cos, sin, batch, cache=None, selection=None, cast=None, rows=...) -> [T, hidden], without gradients.
    cast: x in FP8 with scales (`norm_and_cast`), for `joint_layers`; None if the caller has none.
    rows: the rows of each process, if several compute the layer. x, cast and the result are then this process's rows.
    A process computes its heads for all rows, and the results are summed. If it has few heads and there are many rows,
    it computes all heads for its own rows (`splits_tokens`).
    With a cache, latents and index keys of the new tokens are first written to its pages. Attention reads keys from the
    pages, so FP8 pages round them.
    """

    # Set while the keys that tokens read are counted.
    key_counter: KeyCounter | None = None

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: TokenBatch,
        cache: LayerCache | None = None,
        selection: Selection | None = None,
        *,
        cast: joint_linear.Cast | None = None,
        rows: Rows = ALL_ROWS,
    ) -> torch.Tensor:
        self.check_pass(x, batch, selection)
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "x: a layer for inference has no gradients; accepted: requires_grad=False, or a pass under "
                "torch.no_grad(), got requires_grad=True"
            )
        if cache is not None:
            check_cache(cache, LayerCache)
            check_pages(batch, cache.page_size)
        elif batch.query_lens != batch.key_lens:
            raise ValueError("cache: is needed when a sequence has more keys than new tokens")
        decode = cache is not None and batch.is_decode
        if self.indexer is None:
            sparse = selection.topk_indices is not None
        else:
            # FP8 pages are attended to by index only. A batch-invariant pass does not ask how long others are.
            always = decode and (cache.latent_is_fp8 or is_batch_invariant())
            sparse = always or batch.max_key_len > self.indexer.top_k
        heads = self.n_heads if self.own_part is None else self.own_part.share(self.n_heads)
        multi_head = not decode and (not sparse or self._takes_multi_head_form(x, batch, selection, heads, rows))
        form = Form(decode, sparse, multi_head)
        if self.own_part is not None and rows.shared and not multi_head:
            return self._pass(x, cos, sin, batch, cache, selection, cast, form, rows, queries=rows)
        part = self.part()
        return rows.sum(part._pass(x, cos, sin, batch, cache, selection, cast, form, rows, queries=ALL_ROWS))

    def _pass(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: TokenBatch,
        cache: LayerCache | None,
        selection: Selection | None,
        cast: joint_linear.Cast | None,
        form: Form,
        rows: Rows,
        queries: Rows,
    ) -> torch.Tensor:
        """The result for `queries`, which are all rows or `rows`."""
        decode, sparse, multi_head = form
        latents = self._latents(x, cos, sin, batch, cache, cast, form, rows)
        # Selected keys are gathered, from the pages if these hold x's dtype. FP8 pages are read first, since a prefill
        # would dequantise a key again for every query that selects it; unless all keys would take too much memory.
        # Multi-head attention has all of them in a row.
        in_pages = decode or (not multi_head and cache is not None and self._stay_in_pages(x, batch, cache))
        counted_in = form.counted_in(in_pages)
        if cache is None:
            kv = self._norm_and_rotate(latents.keys, (cos, sin))
        else:
            kv = self._store(latents.keys, cos, sin, batch, cache, in_pages)
        branch = Branch()
        if self.indexer is None:
            topk_indices = selection.indices(counted_in, batch, queries)
            bits = selection.bits.to(x.device) if sparse and multi_head else None
        else:
            # Selection and the queries' projections depend on the same latents and not on each other.
            with side_stream(x, *latents.read()) as branch:
                topk_indices = self._selected(x, latents, cos, sin, batch, cache, form, in_pages, rows, queries)
                bits = dsa.selection_bits(topk_indices, None, batch.max_key_len) if sparse and multi_head else None
            if selection is not None:
                selection.topk_indices, selection.bits = topk_indices, bits
                selection.rows, selection.counted_in, selection.batch = queries, counted_in, batch
        q = self._queries(latents, rows, queries)
        q_nope, q_pe = q.split((self.nope_dim, self.rope_dim), -1)
        stored = stored_up_projection(self, q) if decode else None
        if stored is not None:
            q = dsa.mla_absorb_queries(q_nope, q_pe, queries.own_kept(cos), queries.own_kept(sin), stored)
        elif not multi_head:
            w_uk, w_uv = self._up_projections(x.dtype)
            q = self._absorbed_queries(q_nope, q_pe, w_uk, queries.own_kept(cos), queries.own_kept(sin))
        branch.join()
        if kv is None:  # after the selection, because both take memory in a long context
            kv = self._stored_keys(batch, cache, x.dtype, in_pages)
        if self.key_counter is not None:
            read = visible = batch.visible_keys
            if topk_indices is not None:
                (read,) = queries.gather((topk_indices >= 0).sum(-1))
            self.key_counter.add(read, visible, visible)

        if multi_head and (sparse or self._has_multi_head_kernel(x)):
            return self.o_proj(self._multi_head(q, kv, cos, sin, batch, bits).flatten(-2))
        if multi_head:
            q = self._rotate(q, (cos, sin))
            attended = causal_attention(q, *self._keys_and_values(kv), batch, self.softmax_scale)
            return self.o_proj(attended.flatten(-2))
        if decode:
            attended = self._decode(q, topk_indices, batch, cache)
        elif in_pages and cache.latent_is_fp8:
            attended = self._attend_to_bytes(q, topk_indices, self._counts(topk_indices, batch, queries), cache)
        else:
            arguments = (kv[:, None], topk_indices[:, None], self.softmax_scale, self.kv_lora_rank)
            counts = self._counts(topk_indices, batch, queries)
            attended, *_ = dsa.flash_mla_sparse_fwd(q, *arguments, topk_length=counts, **of_attention())
        if stored is not None:
            cast = dsa.mla_values_cast_to_fp8(attended, stored, self.v_dim, self.o_proj.use_ue8m0)
            return self.o_proj.multiply(cast, x.dtype)
        return self.o_proj(_by_head(attended, w_uv.mT).flatten(-2))

    def _latents(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: TokenBatch,
        cache: LayerCache | None,
        cast: joint_linear.Cast | None,
        form: Form,
        rows: Rows,
    ) -> Latents:
        """Processes exchange the keys' latents here, and the queries' latents in `_queries`."""
        given = (form.sparse or cache is not None) and self._gives_products()
        weights = None
        # Here the indexer's kernels run on a second stream during small kernels; later the queries' product occupies
        # all multiprocessors. The selection's branch is the last one on this stream, and its `join` waits for all.
        early = given and form.decode and form.sparse
        if early:
            _ = batch.slots  # computed before the fork, because both streams read it
            with side_stream(x):
                weights = self.indexer.head_weights(x)
        layers = self.joint_layers() if given else self.joint_layers()[-2:]
        *keys, q_latent, kv = joint_linear.multiply(x, *layers, cast=cast)
        if early:
            with side_stream(x, *keys):
                self.indexer.store(*keys, cos, sin, batch, cache)
        readers = (self.q_b_proj, self.indexer.wq_b) if given and form.sparse else (self.q_b_proj,)
        _, qr, cast = norm_and_cast(self.q_a_layernorm, q_latent, readers)
        kv, *keys = rows.begin_gather_joined(kv, *keys)()
        return Latents(qr, cast, kv, keys[0] if keys else None, weights)

    def _queries(self, latents: Latents, rows: Rows, queries: Rows) -> torch.Tensor:
        """q [T, heads, nope + rope] of `queries` before rope."""
        if rows.shared and not queries.shared:
            q = joint_linear.multiply_gathered(latents.queries, self.q_b_proj, latents.cast, rows)
        else:
            (q,) = joint_linear.multiply(latents.queries, self.q_b_proj, cast=latents.cast)
        return q.unflatten(-1, (self.n_heads, self.nope_dim + self.rope_dim))

    def _gives_products(self) -> bool:
        """Whether `select` is the lightning indexer's own, which takes the products that it would otherwise compute.
        False under torch.compile, which cannot trace this comparison."""
        return (
            not torch.compiler.is_compiling()
            and inspect.unwrap(getattr(self.indexer, "select", None)) is LIGHTNING_SELECT
        )

    def joint_layers(self) -> tuple[Linear | BlockFP8Linear, ...]:
        """The layers whose products with x are one product. The last one may end within a block of 128 rows."""
        own = (self.indexer.wk,) if isinstance(self.indexer, LightningIndexer) else ()
        return *own, self.q_a_proj, self.kv_a_proj_with_mqa

    def _selected(
        self,
        x: torch.Tensor,
        latents: Latents,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: TokenBatch,
        cache: LayerCache | None,
        form: Form,
        in_pages: bool,
        rows: Rows,
        queries: Rows,
    ) -> torch.Tensor | None:
        """The keys that `queries` attend to, counted as `Form.counted_in` says; None if the pass is not sparse. Writes
        the new tokens' index keys to the cache in both cases."""
        if not form.sparse and cache is None:
            return None
        qr, of_index = latents.queries, {}
        if latents.index_keys is not None:
            weights = latents.index_weights
            of_index = {"keys": latents.index_keys, "weights": weights, "stored": weights is not None, "rows": rows}
            if form.sparse:
                (of_index["queries"],) = joint_linear.multiply(qr, self.indexer.wq_b, cast=latents.cast)
        elif rows.shared:
            x, qr = rows.gather(x, qr)
        if not form.sparse:
            self.indexer.select(x, qr, cos, sin, batch, cache, store_only=True, **of_index)
            return None
        topk_indices = self.indexer.select(x, qr, cos, sin, batch, cache, paged_slots=in_pages, **of_index)
        topk_indices = moved(topk_indices, of_index.get("rows", ALL_ROWS), queries)
        if in_pages or form.multi_head:
            return topk_indices
        return packing.packed_rows(topk_indices, queries.own_kept(batch.key_starts), len(batch.key_lens))

    def _store(
        self,
        kv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: TokenBatch,
        cache: LayerCache,
        in_pages: bool,
    ) -> torch.Tensor | None:
        """Writes the new tokens' kv [T, latent + rope], as projected, to the pages. Returns what these hold of all
        keys, [sum(key_lens), latent + rope] in kv's dtype, if it is at hand and not in_pages."""
        norm = self.kv_a_layernorm
        # Where every key is new, what the pages hold need not be read back: `out` gets it, unless they are of another
        # float dtype.
        as_stored = cache.latent_is_fp8 or cache.latent.dtype == kv.dtype
        keep = not in_pages and as_stored and batch.query_lens == batch.key_lens
        rows = torch.empty_like(kv) if keep else None
        dsa.write_mla_cache(kv, norm.weight.float(), cos, sin, cache.latent, batch.slots, eps=norm.eps, out=rows)
        return rows

    def _stay_in_pages(self, x: torch.Tensor, batch: TokenBatch, cache: LayerCache) -> bool:
        """Whether a sparse prefill attends to keys where they are: those of x's dtype, and bytes where all keys of x's
        dtype would take more than `most_read` says."""
        if cache.latent.dtype == x.dtype:
            return True
        read = sum(batch.key_lens) * (self.kv_lora_rank + self.rope_dim) * x.itemsize
        return cache.latent_is_fp8 and read > most_read(self.n_heads)

    def _stored_keys(self, batch: TokenBatch, cache: LayerCache, dtype: torch.dtype, in_pages: bool) -> torch.Tensor:
        """The pages, a row a slot, if in_pages; else what they hold of all keys, [sum(key_lens), latent + rope]."""
        if in_pages:
            return cache.latent.view(-1, cache.latent.shape[-1])
        return dsa.read_kv_cache(cache.latent, batch.key_slots, dtype=dtype)

    def _counts(self, topk_indices: torch.Tensor, batch: TokenBatch, queries: Rows) -> torch.Tensor | None:
        """How many columns of topk_indices count, for each of `queries`; None if all do."""
        counts = batch.selected_counts(topk_indices.shape[1])
        return None if counts is None else queries.own_kept(counts)

    def _absorbed_queries(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, w_uk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """[T, heads, latent + rope]: the queries of the latents and rope keys."""
        # Both parts are written where they belong.
        q = q_nope.new_empty(*q_nope.shape[:2], self.kv_lora_rank + self.rope_dim)
        _by_head(q_nope, w_uk, q[..., : self.kv_lora_rank])
        dsa.apply_rotary(q_pe, cos, sin, interleaved=True, out=q[..., self.kv_lora_rank :])
        return q

    def _decode(
        self, q: torch.Tensor, topk_indices: torch.Tensor | None, batch: TokenBatch, cache: LayerCache
    ) -> torch.Tensor:
        # On a GPU bytes are attended to in bf16, whatever the model's dtype: they have 4 bits.
        dtype = torch.bfloat16 if cache.latent_is_fp8 and q.is_cuda else q.dtype
        by_sequence = (-1, batch.next_n)
        options = {"softmax_scale": self.softmax_scale, "is_fp8_kvcache": cache.latent_is_fp8}
        if topk_indices is None:
            keys = batch.block_table, batch.key_lens_tensor, self.kv_lora_rank, batch.mla_schedule
            options["causal"] = batch.next_n > 1
        else:
            keys = None, None, self.kv_lora_rank, None
            options["indices"] = topk_indices.unflatten(0, by_sequence)
            options |= {"topk_length": batch.most_selected(topk_indices.shape[1])} | of_attention()
        out, _ = dsa.flash_mla_with_kvcache(q.unflatten(0, by_sequence).to(dtype), cache.latent, *keys, **options)
        return out.flatten(0, 1).to(q.dtype)

    def _attend_to_bytes(
        self, q: torch.Tensor, topk_indices: torch.Tensor, counts: torch.Tensor | None, cache: LayerCache
    ) -> torch.Tensor:
        """[T, heads, latent]: a prefill's queries, as if each were a sequence's only one, to slots of FP8 pages."""
        dtype = torch.bfloat16 if q.is_cuda else q.dtype
        options = {"indices": topk_indices[:, None], "topk_length": counts, "is_fp8_kvcache": True}
        options |= of_attention()
        keys = cache.latent, None, None, self.kv_lora_rank, None
        out, _ = dsa.flash_mla_with_kvcache(q[:, None].to(dtype), *keys, softmax_scale=self.softmax_scale, **options)
        return out.squeeze(1).to(q.dtype)

    def _takes_multi_head_form(
        self, x: torch.Tensor, batch: TokenBatch, selection: Selection | None, heads: int, rows: Rows
    ) -> bool:
        """Of a sparse pass, with so many heads. Layers without an indexer take it where the layer that selected took it
        and this pass has the kernel."""
        if self.indexer is None:
            return selection.bits is not None and self._has_multi_head_kernel(x)
        sizes = HeadSizes(heads, self.nope_dim, self.rope_dim, self.v_dim, self.kv_lora_rank)
        return self._has_multi_head_kernel(x) and multi_head_is_faster(
            batch.query_lens, batch.key_lens, self.indexer.top_k, sizes, self._communication(x, rows)
        )

    def _communication(self, x: torch.Tensor, rows: Rows) -> Communication | None:
        """What the multi-head form says beyond the absorbed one: queries' latents and results, and what is selected,
        unless the indexer selects for all rows in either form. Layers without one get this with it: what they say is
        counted as if it were theirs, too."""
        if self.own_part is None or not rows.shared:
            return None
        latents = self.q_lora_rank * x.element_size()
        if isinstance(self.q_b_proj, BlockFP8Linear):
            latents = self.q_lora_rank + 4 * (self.q_lora_rank // BLOCK)  # and scales
        picks = 4 * self.indexer.top_k if self._gives_products() else 0
        result = x.shape[1] * x.element_size()
        return Communication(self.own_part.processes, latents + picks + result, 3 if picks else 2)

    def _has_multi_head_kernel(self, x: torch.Tensor) -> bool:
        """Whether attention runs as one kernel, whatever the lengths, and not as PyTorch."""
        channels = max(self.nope_dim + self.rope_dim, self.v_dim)
        taken = x.dtype in (torch.bfloat16, torch.float16) and channels <= MOST_CHANNELS
        return taken and dsa.runtime.backends.runs_kernel("mha_varlen_fwd", x)

    def _multi_head(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: TokenBatch,
        bits: torch.Tensor | None,
    ) -> torch.Tensor:
        """q [T, heads, nope + rope] before rope, which is overwritten, kv [sum(key_lens), latent + rope] -> [T, heads,
        v_dim], causal per sequence; bits: of the keys that are selected. Without gradients."""
        q_pe = q[..., self.nope_dim :]
        dsa.apply_rotary(q_pe, cos, sin, interleaved=True, out=q_pe)
        latent, k_pe = kv.split((self.kv_lora_rank, self.rope_dim), -1)
        expanded = self.kv_b_proj(latent).unflatten(-1, (self.n_heads, self.nope_dim + self.v_dim))
        k_nope, v = expanded.split((self.nope_dim, self.v_dim), -1)
        sequences = batch.cu_query_lens, batch.cu_key_lens, batch.max_key_len
        # A layer without an indexer reads the bits of all queries, which are those of all keys where they are few.
        dense_keys = 0 if self.indexer is None else self.indexer.top_k
        options = {"k_rope": k_pe, "selected": bits, "dense_keys": dense_keys}
        out, _ = dsa.mha_varlen_fwd(q, k_nope, v, *sequences, self.softmax_scale, **options)
        return out


def _by_head(x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, heads, I] times weights [heads, I, O] -> [T, heads, O], by head; into `out`, if given."""
    if out is None:
        out = x.new_empty(*x.shape[:2], weights.shape[-1])
    torch.bmm(x.transpose(0, 1), weights, out=out.transpose(0, 1))
    return out
