"""Compile the kernels of `scores`, `topk` and `attention` before the model calls them, so that nothing compiles during
a request or a CUDA graph capture. The functions call adapters with small tensors whose shapes and dtypes cover all
kernels that the model can need.
"""

from collections.abc import Iterator

import torch

import dsa
from dsa.kernels.indexer.limits import NEXT_N
from dsa_engines.decoding_batches import decoding_batches
from dsa_engines.grouped_prompts import grouped_prompt
from dsa_engines.sglang import adapters
from dsa_engines.sglang.layouts import INDEX_DIM, INDEX_PAGE, V4_BYTES, V32_BYTES, Model

BF16, E4M3, INT32 = torch.bfloat16, torch.float8_e4m3fn, torch.int32
PADDED_HEADS = 32  # in prefill, SGLang pads an indexer with fewer heads to this number
DRAFT_HEADS = 64  # SGLang's draft model for DeepSeek-V4 (DSpark) pads queries with fewer heads to this number
MOST_COLUMNS = 65536  # wider rows of scores use the same kernels
V4_WINDOW, V4_RATIO = 128, 128  # keys per window; tokens per compressed entry in layers without an indexer
V4_PAGE = 64


def warm_up(model: Model, ops: frozenset[str], device: torch.device | str) -> None:
    """Call the adapters of these ops as the model will. Exceptions of the adapters propagate."""
    with torch.device(device), torch.no_grad():
        if "scores" in ops:
            _scores(model)
        if "topk" in ops:
            _topk(model)
        if "attention" in ops:
            _v4_attention(model) if model.is_v4 else _attention(model)
            _grouped_prompts(model)
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _scores(model: Model) -> None:
    one = torch.ones(1, dtype=INT32)
    heads = model.index_heads if model.is_v4 else max(model.index_heads, PADDED_HEADS)
    kv = torch.zeros(INDEX_PAGE, INDEX_DIM, dtype=E4M3), torch.ones(INDEX_PAGE)
    q, weights = torch.zeros(1, heads, INDEX_DIM, dtype=E4M3), torch.zeros(1, heads)
    columns = INDEX_PAGE if model.is_v4 else 0  # in DeepSeek-V4, column 0 is the query's first key
    adapters.fp8_mqa_logits(q, kv, weights, one - 1, one, False, columns)
    cache, table = torch.zeros(1, INDEX_PAGE, 1, INDEX_DIM + 4, dtype=torch.uint8), torch.zeros(1, 1, dtype=INT32)
    together = {1} if model.is_v4 else {1, model.next_n}
    for next_n in sorted(together & set(NEXT_N)):
        lengths = torch.ones(1, next_n, dtype=INT32)
        plan = adapters.get_paged_mqa_logits_metadata(lengths, INDEX_PAGE, dsa.num_sms(cache.device))
        q = torch.zeros(1, next_n, model.index_heads, INDEX_DIM, dtype=E4M3)
        weights = torch.zeros(next_n, model.index_heads)
        adapters.fp8_paged_mqa_logits(q, cache, weights, lengths, table, plan, INDEX_PAGE)


def _topk(model: Model) -> None:
    """The kernel depends on the number of rows relative to the number of SMs, and on the row length."""
    # In prefill of V3.2 and GLM-5, rows have columns for the keys of all sequences, possibly more than one context.
    keys = model.keys if model.is_v4 else max(model.keys, MOST_COLUMNS)
    for rows, columns in topk_shapes(keys, dsa.num_sms(torch.empty(0).device)):
        adapters.topk(torch.zeros(1, columns).expand(rows, columns), torch.zeros(rows, dtype=INT32), model.topk)


def topk_shapes(keys: int, num_sms: int) -> Iterator[tuple[int, int]]:
    """Yield (rows, columns) of scores that cover all top-k kernels for contexts of up to `keys` keys."""
    for rows in sorted({1, *(num_sms // parts + 1 for parts in (8, 4, 2, 1))}):
        for columns in sorted({min(-(-keys // 256) * 256, MOST_COLUMNS >> halved) for halved in range(4)}):
            yield rows, columns


def _attention(model: Model) -> None:
    q, indices = torch.zeros(1, model.heads, model.query_dim, dtype=BF16), torch.zeros(1, 1, model.topk, dtype=INT32)
    adapters.sparse_prefill(q, torch.zeros(1, 1, model.query_dim, dtype=BF16), indices, 1.0)
    shape = (1, INDEX_PAGE, 1, V32_BYTES if model.fp8_cache else model.query_dim)
    cache = torch.zeros(shape, dtype=torch.uint8 if model.fp8_cache else BF16)
    for queries in decoding_batches(dsa.num_sms(cache.device)):
        q = torch.zeros(queries, 1, model.heads, model.query_dim, dtype=BF16)
        adapters.sparse_decode(q, cache, indices.expand(queries, -1, -1), 512, 1.0)


def _grouped_prompts(model: Model) -> None:
    if grouped := grouped_prompt(model.heads, model.query_dim):
        q, indices = grouped
        adapters.sparse_prefill(q, torch.zeros(1, 1, model.query_dim, dtype=BF16), indices, 1.0)


def v4_widths(model: Model) -> list[int]:
    """Return the largest numbers of compressed entries that a query reads in addition to its window: selected entries,
    and all entries in layers without an indexer, rounded up to pages."""
    return sorted({model.topk, -(-model.keys // (V4_RATIO * V4_PAGE)) * V4_PAGE})


def _v4_attention(model: Model) -> None:
    """Attend to windows alone, to windows and selected entries, and to windows and all entries of layers without an
    indexer."""
    sink = torch.zeros(model.heads)
    drafting = model.next_n > 1 and model.heads < DRAFT_HEADS
    q, kv = torch.zeros(1, model.heads, 512, dtype=BF16), torch.zeros(1, 1, 512, dtype=BF16)
    adapters.sparse_prefill(q, kv, torch.zeros(1, 1, V4_WINDOW, dtype=INT32), 1.0, attn_sink=sink)
    cache = torch.zeros(1, V4_PAGE, 1, V4_BYTES, dtype=torch.uint8)
    for queries in decoding_batches(dsa.num_sms(cache.device)):
        q = torch.zeros(queries, 1, model.heads, 512, dtype=BF16)
        window = torch.zeros(1, 1, V4_WINDOW, dtype=INT32).expand(queries, -1, -1)
        adapters.sparse_decode(q, cache, window, 512, 1.0, attn_sink=sink)
        if drafting:
            padded = torch.zeros(queries, 1, DRAFT_HEADS, 512, dtype=BF16)
            adapters.sparse_decode(padded, cache, window, 512, 1.0, attn_sink=torch.zeros(DRAFT_HEADS))
        for width in v4_widths(model):
            selected = torch.zeros(1, 1, width, dtype=INT32).expand(queries, -1, -1)
            adapters.sparse_decode(q, cache, window, 512, 1.0, None, sink, cache, selected)
