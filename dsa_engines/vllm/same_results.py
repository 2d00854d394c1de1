"""Comparison with vLLM's own kernels before they are replaced, for versions of vLLM that were not tested.

Scores, top-k, attention and queries are compared here, on small inputs in caches that vLLM's own kernels write. Parts
that need a layer of the model are compared when they are first called (`dsa_engines.first_call`).
"""

from collections.abc import Callable

import torch

from dsa.compat import deep_gemm
from dsa_engines.first_call import agree
from dsa_engines.replacements import NotFound, find
from dsa_engines.vllm import adapters, queries, seams
from dsa_engines.vllm.models import Calls

TOKENS, PAGE, INT32 = 150, 64, torch.int32


def check(part: str, calls: Calls) -> None:
    """Raise NotFound if a part's results differ from those of vLLM's own kernels. Call before anything is replaced."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        for compare in _CHECKS.get(part, ()):
            try:
                compare(calls)
            except NotFound:
                raise
            except Exception as error:
                raise NotFound(f"{part} cannot be compared ({type(error).__name__}: {error})") from error


def _index_cache(calls: Calls) -> tuple[torch.Tensor, torch.Tensor]:
    """(pages of TOKENS index keys, written by vLLM; their block table)."""
    ops = find(f"{seams.OPS}:indexer_k_quant_and_cache").value
    pages = -(-TOKENS // PAGE)
    cache = torch.zeros(pages, PAGE, calls.index_head_dim + 4, dtype=torch.uint8)
    keys = torch.randn(TOKENS, calls.index_head_dim, dtype=torch.bfloat16)
    ops(keys, cache, torch.arange(TOKENS), 128, "ue8m0")
    return cache, torch.arange(pages, dtype=INT32)[None]


def _gathered_keys(calls: Calls) -> None:
    cache, table = _index_cache(calls)
    ends, results = torch.tensor([0, TOKENS], dtype=INT32), []
    for gather in (find(f"{seams.OPS}:cp_gather_indexer_k_quant_cache").value, adapters.gather_keys):
        k = torch.zeros(TOKENS, calls.index_head_dim, dtype=torch.float8_e4m3fn)
        scale = torch.zeros(TOKENS, 4, dtype=torch.uint8)
        gather(cache, k, scale, table, ends)
        results.append(torch.cat([k.view(torch.uint8), scale], dim=1))
    agree("the gather of index keys", results[1], results[0], 0.0)


def _prompt_scores(calls: Calls) -> None:
    gemm, heads, dim = find(f"{seams.DEEP_GEMM}:_lazy_init").owner, calls.index_heads, calls.index_head_dim
    q = torch.randn(TOKENS, heads, dim).to(torch.float8_e4m3fn)
    kv = torch.randn(TOKENS, dim).to(torch.float8_e4m3fn), torch.rand(TOKENS) + 0.5
    weights, starts = torch.randn(TOKENS, heads), torch.zeros(TOKENS, dtype=INT32)
    ends = torch.arange(1, TOKENS + 1, dtype=INT32)
    seen = torch.arange(TOKENS) < ends[:, None]
    arguments = (q, None), kv, weights, starts, ends, TOKENS
    expected, found = (f(*arguments)[:, :TOKENS][seen] for f in (gemm.fp8_fp4_mqa_logits, deep_gemm.fp8_fp4_mqa_logits))
    agree("the scores of a prompt", found, expected, 1e-3)


def _step_scores(calls: Calls) -> None:
    gemm, heads, dim = find(f"{seams.DEEP_GEMM}:_lazy_init").owner, calls.index_heads, calls.index_head_dim
    cache, table = _index_cache(calls)
    q, weights = torch.randn(1, 1, heads, dim).to(torch.float8_e4m3fn), torch.randn(1, heads)
    lengths, sms = torch.tensor([[TOKENS]], dtype=INT32), torch.cuda.get_device_properties(0).multi_processor_count
    results = []
    for module in (gemm, deep_gemm):
        plan = module.get_paged_mqa_logits_metadata(lengths, PAGE, sms)
        arguments = (q, None), cache.unsqueeze(2), weights, lengths, table, plan, table.shape[1] * PAGE
        results.append(module.fp8_fp4_paged_mqa_logits(*arguments)[:, :TOKENS])
    agree("the scores of a step", results[1], results[0], 1e-3)


def _selections(calls: Calls) -> None:
    columns = calls.topk + 1000
    logits = torch.rand(4 * columns).argsort().view(4, columns).float()  # all different
    zeros, lengths = torch.zeros(4, dtype=INT32), torch.full((4,), columns, dtype=INT32)
    of_step = find(f"{seams.TOPK}:get_indexer_topk").value("auto")
    results = []
    for prompt, step in (
        (find(f"{seams.OPS}:top_k_per_row_prefill").value, lambda *given: of_step(*given, columns)),
        (adapters.topk_prefill, adapters.topk_decode),
    ):
        for call, given in (
            (prompt, lambda out: (logits, zeros, lengths, out, 4, columns, 1, calls.topk)),
            (step, lambda out: (logits, lengths[:, None], 1, out, calls.topk)),
        ):
            out = torch.empty(4, calls.topk, dtype=INT32)
            call(*given(out))
            results.append(out.sort().values)
    agree("top-k of a prompt", results[2], results[0], 0.0)
    agree("top-k of a step", results[3], results[1], 0.0)


def _attention(calls: Calls) -> None:
    width = calls.topk if calls.query_dim == 576 else calls.window
    pages, heads = -(-width // PAGE), max(64, calls.heads)
    slots, scale = torch.arange(pages * PAGE), calls.query_dim**-0.5
    q = torch.randn(2, 1, heads, calls.query_dim, dtype=torch.bfloat16)
    indices = torch.arange(width, dtype=INT32).expand(2, 1, -1).contiguous()
    sparse = find(f"{seams.FLASHMLA_SPARSE}:FlashMLASparseImpl").owner
    if calls.query_dim == 576:
        cache = torch.zeros(pages, PAGE, 656, dtype=torch.uint8)
        latents, rope = (torch.randn(len(slots), n, dtype=torch.bfloat16) for n in (512, 64))
        write = find(f"{seams.OPS}:concat_and_cache_mla").value
        write(latents, rope, cache, slots, "fp8_ds_mla", torch.ones(1))
        found = adapters.fp8_attention(q, cache, indices, scale)[0]
    else:
        cache = torch.zeros(pages, PAGE * 584, dtype=torch.uint8)
        write = find("vllm.models.deepseek_v4.common.ops.cache_utils:quantize_and_insert_k_cache").value
        write(torch.randn(len(slots), 512, dtype=torch.bfloat16), cache, slots)
        cache = cache.view(pages, PAGE, 584)
        options = {"is_fp8_kvcache": True, "indices": indices}
        found = adapters.v4_attention(q, cache.unsqueeze(2), None, None, 512, None, None, scale, False, **options)[0]
    plan = sparse.get_mla_metadata()[0]
    expected, _ = sparse.flash_mla_with_kvcache(
        *(q, cache.unsqueeze(-2), None, None, 512, plan),
        softmax_scale=scale,
        is_fp8_kvcache=True,
        indices=indices,
    )
    agree("attention", found, expected, 0.02)


def _rotated_queries(calls: Calls) -> None:
    if not calls.head_dims[2]:
        return
    (nope, rope, _), tokens = calls.head_dims, queries.LEAST_TOKENS
    q = torch.randn(tokens, calls.heads, nope + rope, dtype=torch.bfloat16)
    index_q = torch.randn(tokens, calls.index_heads, calls.index_head_dim, dtype=torch.bfloat16)
    angles = torch.rand(tokens, rope // 2)
    cos_sin, weights = torch.cat([angles.cos(), angles.sin()], -1), torch.rand(tokens, calls.index_heads).bfloat16()
    own = find(f"{seams.V32_LAYER}:fused_q").value
    for interleaved in (False, True):
        results = []
        for prepare in (own, queries.fused_q(own)):
            given = torch.arange(tokens), q[..., nope:], cos_sin, index_q.clone(), cos_sin, q[..., :nope], torch.ones(1)
            index_q8, scaled, rotated = prepare(
                *(*given, weights, 0.5, 0.25), index_rope_interleave=interleaved, quantize_mqa=False
            )
            results.append((index_q8.float() * scaled[..., None], rotated))
        agree("index queries", results[1][0], results[0][0], 0.02)
        agree("rotated queries", results[1][1], results[0][1], 0.01)


_CHECKS: dict[str, tuple[Callable[[Calls], None], ...]] = {
    "scores": (_gathered_keys, _prompt_scores, _step_scores),
    "topk": (_selections,),
    "select": (_prompt_scores, _selections),
    "attention": (_attention,),
    "queries": (_rotated_queries,),
}
