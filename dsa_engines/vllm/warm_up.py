"""Compiling what a model will call, before it does: no request waits for a compiler, nor does one run while a CUDA
graph is captured. Every adapter is called with small tensors of the kinds and shapes that choose between kernels.

Kernels of `experts` and `linear` depend on the weights' shapes, and compile when a layer of a new shape first runs."""

from collections.abc import Iterator

import torch

import dsa
from dsa.compat import deep_gemm
from dsa_engines.decoding_batches import decoding_batches
from dsa_engines.grouped_prompts import grouped_prompt
from dsa_engines.vllm import adapters, select
from dsa_engines.vllm import queries as queries_of_v32
from dsa_engines.vllm.models import Calls

PAGE = 64  # index keys of a page, whatever the engine's pages have
MOST_COLUMNS = 65536  # wider rows use the same kernels
INT32 = torch.int32


def warm_up(calls: Calls, ops: frozenset[str], device: torch.device | str = "cuda") -> None:
    """Calls the adapters of these ops as the model will."""
    with torch.device(device):
        if "scores" in ops:
            scores(calls)
        if "topk" in ops:
            topk(calls)
        if "attention" in ops:
            v4_attention(calls) if calls.query_dim == 512 else attention(calls)
            grouped_prompts(calls)
        if "select" in ops and calls.keys >= select.LEAST_KEYS:
            selection(calls)
        if "prefill" in ops and calls.head_dims[2]:
            multi_head(calls)
        if "queries" in ops and calls.head_dims[2]:
            rotated_queries(calls)
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def failing(calls: Calls, ops: frozenset[str]) -> dict[str, str]:
    """Warm up each of these ops. Return {op: why its kernels do not compile or run}."""
    reasons = {}
    for op in sorted(ops):
        try:
            warm_up(calls, frozenset({op}))
        except Exception as error:  # whatever it is, the other ops and the engine go on
            reasons[op] = " ".join(f"{type(error).__name__}: {error}".split())
    return reasons


def scores(calls: Calls) -> None:
    heads, dim = calls.index_heads, calls.index_head_dim
    cache = torch.zeros(1, PAGE, dim + 4, dtype=torch.uint8)
    k, k_scale = torch.zeros(PAGE, dim, dtype=torch.float8_e4m3fn), torch.zeros(PAGE, 4, dtype=torch.uint8)
    table, ends = torch.zeros(1, 1, dtype=INT32), torch.tensor([0, PAGE], dtype=INT32)
    adapters.gather_keys(cache, k, k_scale, table, ends)
    q, weights = torch.zeros(1, heads, dim, dtype=torch.float8_e4m3fn), torch.zeros(1, heads)
    kv = k, k_scale.view(torch.float32).squeeze(1)
    deep_gemm.fp8_fp4_mqa_logits((q, None), kv, weights, ends[:1], ends[1:], PAGE)
    for next_n in range(1, calls.next_n + 1):
        lengths = torch.ones(1, next_n, dtype=INT32)
        plan = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE, dsa.num_sms(cache.device))
        queries, pages = q.expand(next_n, heads, dim).contiguous().unsqueeze(0), cache.unsqueeze(2)
        weights = torch.zeros(next_n, heads)
        deep_gemm.fp8_fp4_paged_mqa_logits((queries, None), pages, weights, lengths, table, plan, PAGE)


def topk(calls: Calls) -> None:
    """Kernels depend on the number of rows relative to that of SMs, and on the length of rows."""
    sms = dsa.num_sms(torch.empty(0).device)
    columns = sorted({min(calls.keys, MOST_COLUMNS >> halved) for halved in range(4)})
    rows = sorted({1, *(sms // parts + 1 for parts in (8, 4, 2, 1))})
    buffer = torch.empty(rows[-1], calls.topk, dtype=INT32)
    for width in columns:
        logits, none = torch.zeros(rows[-1], width), torch.zeros(rows[-1], dtype=INT32)
        for count in rows:
            adapters.topk_decode(logits[:count], none[:count, None], 1, buffer[:count], calls.topk)
            zeros = none[:count]
            adapters.topk_prefill(logits[:count], zeros, zeros, buffer[:count], count, width, 1, calls.topk)


def attention(calls: Calls) -> None:
    cache = torch.zeros(1, PAGE, 656, dtype=torch.uint8)
    for q, indices in queries(calls, calls.topk):
        if calls.fp8_cache:
            adapters.fp8_attention(q.unsqueeze(1), cache, indices.unsqueeze(1), 1.0)
    rows, none = torch.zeros(1, calls.query_dim, dtype=torch.bfloat16), torch.zeros(1, dtype=INT32)
    adapters.bf16_attention(q[:1], rows, indices[:1], 1.0, none, calls.heads, None)


def v4_attention(calls: Calls) -> None:
    """Over windows alone, and with selected entries of 4 tokens, or with all entries of 128 tokens."""
    heads = adapters.v4_heads(calls.heads)
    sink = torch.zeros(heads)
    window, entries = (torch.zeros(1, PAGE, 1, 584, dtype=torch.uint8) for _ in range(2))
    for width in sorted({0, calls.topk, -(-calls.compressed // 128) * 128}):
        for q, indices in queries(calls, calls.window + width):
            q, none = q.unsqueeze(1), torch.zeros(len(q), dtype=INT32)
            options = {"indices": indices[:, None, : calls.window], "topk_length": none, "attn_sink": sink}
            if width:
                options |= {
                    "extra_k_cache": entries,
                    "extra_indices_in_kvcache": indices[:, None, calls.window :],
                    "extra_topk_length": none,
                }
            out = torch.empty_like(q)
            adapters.v4_attention(
                q, window, None, None, 512, None, softmax_scale=1.0, is_fp8_kvcache=True, out=out, **options
            )
    rows = torch.zeros(1, 1, 512, dtype=torch.bfloat16)
    adapters.v4_prefill(
        q[:1, 0], rows, options["indices"][:1], 1.0, attn_sink=sink, topk_length=none[:1], out=out[:1, 0]
    )


def selection(calls: Calls) -> None:
    """Of a prompt over a long context."""
    rows, keys, (heads, dim) = select.LEAST_QUERIES, select.LEAST_KEYS, (calls.index_heads, calls.index_head_dim)
    q, k = (torch.zeros(*shape, dtype=torch.float8_e4m3fn) for shape in ((rows, heads, dim), (keys, dim)))
    starts, ends = torch.zeros(rows, dtype=INT32), torch.full((rows,), keys, dtype=INT32)
    dsa.indexer_select(q, (k, torch.zeros(keys)), torch.zeros(rows, heads), starts, ends, calls.topk)


def multi_head(calls: Calls) -> None:
    """Of prompts by the keys and values of every head, all of them or selected ones."""
    (nope, rope, value), ends = calls.head_dims, torch.tensor([0, 1], dtype=INT32)
    q = torch.zeros(1, calls.heads, nope + rope, dtype=torch.bfloat16)
    k, v = torch.zeros(1, calls.heads, nope + value, dtype=torch.bfloat16).split([nope, value], dim=-1)
    bits = dsa.selection_bits(torch.zeros(1, calls.topk, dtype=INT32), None, 1)
    for selected in (None, bits):
        dsa.mha_varlen_fwd(
            *(q, k, v, ends, ends, 1, 1.0), k_rope=q[:, 0, :rope], selected=selected, dense_keys=calls.topk
        )


def rotated_queries(calls: Calls) -> None:
    (nope, rope, _), tokens = calls.head_dims, queries_of_v32.LEAST_TOKENS
    q = torch.zeros(tokens, calls.heads, nope + rope, dtype=torch.bfloat16)
    index_q = torch.zeros(tokens, calls.index_heads, calls.index_head_dim, dtype=torch.bfloat16)
    positions, cos_sin = torch.zeros(tokens, dtype=torch.int64), torch.zeros(1, rope)
    weights = torch.zeros(tokens, calls.index_heads, dtype=torch.bfloat16)
    prepare = queries_of_v32.fused_q(lambda: None)
    for interleaved in (False, True):
        prepare(
            *(positions, q[..., nope:], cos_sin, index_q, cos_sin, q[..., :nope], weights, weights, 1.0, 1.0),
            index_rope_interleave=interleaved,
            quantize_mqa=False,
        )


def grouped_prompts(calls: Calls) -> None:
    heads = adapters.v4_heads(calls.heads) if calls.query_dim == 512 else calls.heads
    if grouped := grouped_prompt(heads, calls.query_dim):
        q, indices = grouped
        adapters.v4_prefill(q, torch.zeros(1, 1, calls.query_dim, dtype=torch.bfloat16), indices, 1.0)


def queries(calls: Calls, width: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(q [T, heads, d], indices [T, width] of no key) of numbers of tokens by which kernels are chosen."""
    heads = adapters.v4_heads(calls.heads) if calls.query_dim == 512 else calls.heads
    # Where a step has fewer tokens than a batch, its largest batch takes that one's place.
    for count in sorted({min(n, calls.tokens) for n in decoding_batches(dsa.num_sms(torch.empty(0).device))}):
        q = torch.zeros(count, heads, calls.query_dim, dtype=torch.bfloat16)
        yield q, torch.full((count, width), -1, dtype=INT32)
