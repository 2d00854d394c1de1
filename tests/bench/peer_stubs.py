"""Stubs of the peers' packages, because the real packages need a GPU. Their functions have the same names and
arguments, and compute the results with our references.

The stubs assert what the libraries' host code checks on Hopper.
"""

import functools
import types
from collections.abc import Callable

import torch

# Import by name. While a model runs on the peers' kernels, the attributes of `dsa` are the peers' ops.
from dsa import (
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    get_paged_mqa_logits_metadata,
    hyper_collapse,
    hyper_expand,
    merge_attention,
    per_token_cast_to_fp8,
    topk_indices,
)

FP8, INT = torch.float8_e4m3fn, torch.int32
SMS = 132


def flash_mla(*, use_legacy: bool, heads: tuple[int, ...] = (64, 128)) -> types.ModuleType:
    """Return the stub of FlashMLA.

    use_legacy  True: SGLang's build, whose functions must be called with `use_legacy=True`. False: vLLM's build, whose
                functions do not have this parameter
    heads       head counts that sparse prefill accepts besides 64 and 128
    """
    module, expected_legacy = types.ModuleType("flash_mla"), {"use_legacy": True} if use_legacy else {}

    class Plan:
        tensors = None

    def sparse(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, **legacy):
        assert legacy == expected_legacy
        assert q.dtype == kv.dtype == torch.bfloat16 and q.dim() == kv.dim() == 3 and indices.dtype == INT
        assert q.shape[1] in (*heads, 64, 128), f"Unsupported h_q: {q.shape[1]}"
        assert indices.shape == (len(q), 1, indices.shape[2]) and indices.stride(-1) == 1 and d_v == 512
        assert indices.shape[2] % 128 == 0 and q.shape[2] == kv.shape[2] and q.shape[2] in (512, 576)
        return list(flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v, attn_sink, topk_length))

    def decode(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits=None,
        softmax_scale=None,
        causal=False,
        is_fp8_kvcache=None,
        indices=None,
        attn_sink=None,
        extra_k_cache=None,
        extra_indices_in_kvcache=None,
        **legacy,
    ):
        assert legacy == expected_legacy
        assert isinstance(tile_scheduler_metadata, Plan) and num_splits is None and head_dim_v == 512
        tile_scheduler_metadata.tensors = True
        assert q.dtype == torch.bfloat16 and q.stride(-1) == 1 and q.shape[3] in (512, 576)
        if indices is None:
            assert k_cache.dtype == q.dtype and k_cache.shape[1] == 64 and not is_fp8_kvcache
            assert block_table.dtype == cache_seqlens.dtype == INT and cache_seqlens.is_contiguous()
        else:
            assert not causal and is_fp8_kvcache and k_cache.dtype == torch.uint8
            assert q.shape[2] in (64, 128), f"Unsupported h_q: {q.shape[2]}"
            assert k_cache.stride(1) == k_cache.shape[3] == (656 if q.shape[3] == 576 else 584)
            assert indices.dtype == INT and indices.shape[:2] == q.shape[:2] and indices.shape[2] % 64 == 0
        arguments = (q, k_cache, block_table, cache_seqlens, head_dim_v, None, None, softmax_scale, causal)
        extra = {"extra_k_cache": extra_k_cache, "extra_indices_in_kvcache": extra_indices_in_kvcache}
        return flash_mla_with_kvcache(*arguments, bool(is_fp8_kvcache), indices, attn_sink, **extra)

    module.get_mla_metadata = lambda *arguments, **options: (Plan(), None)
    module.flash_mla_sparse_fwd, module.flash_mla_with_kvcache = sparse, decode
    return module


def _check_scores(q, kv, weights, starts, ends) -> None:
    keys, scales = kv
    assert q.is_contiguous() and q.dtype == keys.dtype == FP8 and q.shape[1] in (32, 64) and q.shape[2] in (32, 64, 128)
    assert keys.is_contiguous() and scales.shape == (len(keys),) and scales.dtype == torch.float32
    assert weights.shape == q.shape[:2] and weights.dtype == torch.float32 and weights.stride(1) == 1
    for bound in (starts, ends):
        assert bound.shape == (len(q),) and bound.dtype == INT and bound.is_contiguous()


def _check_paged(q, cache, weights, lengths, table, plan, next_ns: tuple[int, ...]) -> None:
    assert q.is_contiguous() and q.dtype == FP8 and q.shape[2] in (32, 64) and q.shape[1] in next_ns
    assert cache.dtype == torch.uint8 and cache.shape[1] in (32, 64) and cache.shape[2:] == (1, q.shape[3] + 4)
    assert cache.stride(0) % 4 == 0 and weights.shape == (len(q) * q.shape[1], q.shape[2])
    assert lengths.shape == q.shape[:2] and lengths.dtype == table.dtype == INT and lengths.is_contiguous()
    assert plan.shape == (SMS // (2 if q.shape[1] == 4 else 1) + 1, 2) and plan.dtype == INT and plan.is_contiguous()


def _plan(context_lens, block_kv, num_sms, indices=None):
    assert context_lens.dim() == 2 and context_lens.dtype == INT and context_lens.is_contiguous() and indices is None
    assert block_kv in (32, 64) and num_sms > 0
    return torch.zeros(num_sms + 1, 2, dtype=INT)


def _paged(q, cache, weights, lengths, table, columns):
    plan = get_paged_mqa_logits_metadata(lengths[:, -1].contiguous(), cache.shape[1], SMS)
    scores = fp8_paged_mqa_logits(q, cache, weights, lengths[:, -1].contiguous(), table, plan, columns)
    return torch.where(scores == -torch.inf, torch.nan, scores)  # the library does not write these scores


def _column_major(scales: torch.Tensor) -> torch.Tensor:
    aligned = -(-scales.shape[-2] // 4) * 4
    padded = torch.nn.functional.pad(scales.mT.contiguous(), (0, aligned - scales.shape[-2]))
    return padded.mT[..., : scales.shape[-2], :]


def _check_product(a, b, d) -> None:
    assert a[0].dtype == b[0].dtype == FP8 and a[0].is_contiguous() and b[0].is_contiguous()
    assert d.dtype == torch.bfloat16 and d.stride(-1) == 1 and d.shape == (*a[0].shape[:-1], b[0].shape[-2])
    assert a[1].shape == (*a[0].shape[:-1], a[0].shape[-1] // 128) and a[1].dtype == torch.float32
    # The library uses column-major scales as they are, and converts row-major ones in every call.
    assert a[1].is_contiguous() or (a[1].stride(-2) == 1 and a[1].stride(-1) % 4 == 0)
    assert b[1].shape == (*b[0].shape[:-2], -(-b[0].shape[-2] // 128), b[0].shape[-1] // 128) and b[1].is_contiguous()


def _numbers(a) -> torch.Tensor:
    return a[0].float() * a[1].repeat_interleave(128, -1)


def _matrix(b) -> torch.Tensor:
    return b[0].float() * b[1].repeat_interleave(128, -1).repeat_interleave(128, -2)[..., : b[0].shape[-2], :]


def _gemm(a, b, d, c=None):
    _check_product(a, b, d)
    d.copy_(_numbers(a) @ _matrix(b).mT)


def _contiguous(a, b, d, grouped_layout):
    assert grouped_layout.shape == (len(d),) and grouped_layout.dtype == INT and grouped_layout.is_contiguous()
    assert len(d) % 128 == 0 and (grouped_layout.view(-1, 128) == grouped_layout[::128, None]).all()
    _check_product(a, (b[0][0], b[1][0]), d)
    matrices = _matrix(b)
    for group in grouped_layout.unique().tolist():
        rows = grouped_layout == group
        if group < 0:  # the library does not write padding rows
            d[rows] = torch.nan
            continue
        d[rows] = (_numbers((a[0][rows], a[1][rows])) @ matrices[group].mT).bfloat16()


def _masked(a, b, d, masked_m, expected_m):
    assert masked_m.shape == (len(b[0]),) and masked_m.dtype == INT and masked_m.is_contiguous() and expected_m > 0
    _check_product(a, b, d)
    d.fill_(torch.nan)
    product = (_numbers(a) @ _matrix(b).mT).bfloat16()
    for group, rows in enumerate(masked_m.tolist()):
        d[group, :rows] = product[group, :rows]


def _products(module: types.ModuleType) -> types.ModuleType:
    module.get_num_sms = lambda: SMS
    module.set_pdl = functools.partial(setattr, module, "pdl")
    module.get_paged_mqa_logits_metadata, module.get_mn_major_tma_aligned_tensor = _plan, _column_major
    module.fp8_gemm_nt, module.m_grouped_fp8_gemm_nt_contiguous = _gemm, _contiguous
    return module


def deep_gemm() -> types.ModuleType:
    """Return the stub of the older build of DeepGEMM. Column s of the index scores belongs to key s."""
    module = _products(types.ModuleType("deep_gemm"))

    def scores(q, kv, weights, starts, ends, clean_logits=True, max_seqlen_k=0):
        _check_scores(q, kv, weights, starts, ends)
        found = fp8_mqa_logits(q, kv, weights, starts, ends)
        return found if clean_logits else torch.where(found == -torch.inf, torch.nan, found)

    def paged(q, cache, weights, lengths, table, plan, columns, clean_logits=False):
        _check_paged(q, cache, weights, lengths, table, plan, (1, 2))
        return _paged(q, cache, weights, lengths, table, columns)

    module.fp8_mqa_logits, module.fp8_paged_mqa_logits = scores, paged
    return module


def deep_gemm_2_8() -> types.ModuleType:
    """Return the stub of DeepGEMM 2.8.1. Column 0 of a row of index scores belongs to the first key in the row's
    range."""
    module = _products(types.ModuleType("vllm.third_party.deep_gemm"))

    def scores(q, kv, weights, starts, ends, max_seqlen_k, schedule_meta=None):
        (q, scale), schedule = q, schedule_meta
        assert scale is None and schedule is None and max_seqlen_k > 0
        _check_scores(q, kv, weights, starts, ends)
        assert (ends - starts).max() <= max_seqlen_k
        found, out = fp8_mqa_logits(q, kv, weights, starts, ends), torch.full((len(q), max_seqlen_k), torch.nan)
        for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist())):
            out[row, : end - start] = found[row, start:end]
        return out

    def paged(q, cache, weights, lengths, table, plan, columns, indices=None):
        q, scale = q
        assert scale is None and indices is None
        _check_paged(q, cache, weights, lengths, table, plan, (1, 2, 4))
        return _paged(q, cache, weights, lengths, table, columns)

    def prenorm(a, b, d, sqr_sum, num_splits=None):
        (splits, tokens, outputs), channels = d.shape, b.shape[1]
        assert module.pdl is True and a.dtype == torch.bfloat16 and b.dtype == d.dtype == sqr_sum.dtype == torch.float32
        assert a.shape == (tokens, channels) and b.shape == (outputs, channels) and channels % 64 == 0
        assert outputs <= 32 and outputs % 8 == 0 and sqr_sum.shape == (splits, tokens) and num_splits == splits
        for part, (x, w) in enumerate(zip(a.float().tensor_split(splits, 1), b.tensor_split(splits, 1))):
            d[part], sqr_sum[part] = x @ w.T, x.square().sum(1)

    module.fp8_fp4_mqa_logits, module.fp8_fp4_paged_mqa_logits = scores, paged
    module.m_grouped_fp8_gemm_nt_masked, module.tf32_hc_prenorm_gemm = _masked, prenorm
    return module


def tile_kernels() -> types.ModuleType:
    module = types.ModuleType("tile_kernels")
    module.set_pdl = functools.partial(setattr, module, "pdl")

    def collapse(products, squares, scale, base, streams, post, comb, x, *numbers, n_splits=16):
        *numbers, splits = numbers
        tokens, n, channels = streams.shape
        assert module.pdl is True and numbers == [1e-6, 1e-6, 1e-6, 2.0, 20] and splits == len(products) == len(squares)
        assert (post.shape, comb.shape, x.shape) == ((tokens, n), (tokens, n * n), (tokens, channels))
        torch.testing.assert_close(squares.sum(0), streams.float().square().sum((1, 2)))
        for target, found in zip((x, post, comb), hyper_collapse(streams, products.sum(0), base, scale)):
            target.copy_(found.view_as(target))

    def expand(y, streams, post, comb, out):
        batch, tokens, n, channels = streams.shape
        assert module.pdl is True and channels % 128 == 0 and y.shape == (batch, tokens, channels)
        assert post.shape == (batch, tokens, n, 1) and comb.shape == (batch, tokens, n, n)
        out[0] = hyper_expand(y[0], streams[0], post[0, :, :, 0], comb[0])

    module.mhc = types.SimpleNamespace(mhc_pre_big_fuse_fwd=collapse, mhc_post_fwd=expand)
    return module


def deepselect() -> types.SimpleNamespace:
    def topk(scores, ends, topk, *, capacity, cluster_size, indices):
        assert scores.stride(1) == 1 and scores.stride(0) % 4 == 0 and scores.data_ptr() % 16 == 0
        assert ends.shape == (len(scores),) and ends.dtype == indices.dtype == INT and ends.is_contiguous()
        assert 1 <= topk <= capacity == 2048 and cluster_size == 4 and indices.shape == (len(scores), topk)
        indices.copy_(_topk(scores, ends, topk))

    choices = {"capacity_for": lambda topk: 2048, "choose_cluster_size": lambda rows, width, capacity, sms: 4}
    return types.SimpleNamespace(deepselect_topk=topk, **choices)


def vllm_operators() -> types.SimpleNamespace:
    def prefill(scores, starts, ends, out, rows, stride, inner, k):
        assert (rows, stride, inner) == (len(scores), *scores.stride()) and out.shape == (rows, k) and out.dtype == INT
        out.copy_(_topk(scores, ends - starts, k, starts))

    def decode(scores, next_n, lengths, out, rows, stride, inner, k):
        assert next_n == 1
        prefill(scores, torch.zeros_like(lengths), lengths, out, rows, stride, inner, k)

    def with_workspace(scores, lengths, out, workspace, k, columns):
        assert workspace.dtype == torch.uint8 and columns == scores.shape[1] and scores.is_contiguous()
        out.copy_(_topk(scores, lengths, k))

    def cast(x, q, s, group, eps, low, high, ue8m0, transposed, aligned):
        _cast(x, q, s, group, eps, low, high, ue8m0)

    def merge(out, lse, a, log_a, b, log_b, prefill_tokens_with_context, output_scale=None):
        assert lse.shape == log_a.shape == log_b.shape == (a.shape[1], len(a)) and prefill_tokens_with_context is None
        found = merge_attention([a, b], [log_a.T.contiguous(), log_b.T.contiguous()])
        out.copy_(found[0])
        lse.copy_(found[1].T)

    return types.SimpleNamespace(
        top_k_per_row_prefill=prefill,
        top_k_per_row_decode=decode,
        persistent_topk=with_workspace,
        cooperative_topk=with_workspace,
        per_token_group_fp8_quant=cast,
        merge_attn_states=merge,
    )


def sglang_operators() -> types.SimpleNamespace:
    def topk(scores, out, lengths, row_starts):
        assert out.shape[1] == 2048 and row_starts is None
        out.copy_(_topk(scores, lengths, 2048))

    def merge(a, log_a, b, log_b, out, lse):
        assert lse.shape == log_a.shape == log_b.shape == a.shape[:2]
        for target, found in zip((out, lse), merge_attention([a, b], [log_a, log_b])):
            target.copy_(found)

    return types.SimpleNamespace(fast_topk=topk, merge_state_v2=merge, sgl_per_token_group_quant_8bit=_cast)


def _topk(scores, lengths, k, starts=None):
    """Return the indices in reverse order, because the libraries guarantee no order."""
    return topk_indices(scores, k, lengths=lengths, starts=starts).flip(1)


def _cast(x, q, s, group, eps, low, high, ue8m0):
    assert (group, low, high) == (128, -448.0, 448.0) and q.dtype == FP8 and s.shape == (len(x), x.shape[1] // 128)
    for target, found in zip((q.view(torch.uint8), s), per_token_cast_to_fp8(x, ue8m0)):
        target.copy_(found.view(target.dtype))


def cudnn() -> types.ModuleType:
    module = types.ModuleType("cudnn")

    def scores(q, k, w, ratio, qhead_per_kv_head, precision, q_scale, k_scale, q_causal_offsets):
        _, tokens, heads, _ = q.shape
        assert (ratio, qhead_per_kv_head, precision) == (1, heads, "fp8") and q_scale.shape == (1, tokens, heads)
        assert k_scale.shape == k.shape[:3] and q_causal_offsets.dtype == INT
        ends = torch.arange(tokens, dtype=INT) + q_causal_offsets + 1
        kv = k[0, :, 0], k_scale[0, :, 0].contiguous()
        return {0: fp8_mqa_logits(q[0], kv, w[0], torch.zeros_like(ends), ends)[None]}

    def topk(scores, lengths, k, return_val, deterministic):
        assert return_val is False
        return {0: _topk(scores, lengths, k)}

    module.DSA = types.SimpleNamespace(indexer_forward_wrapper=scores, indexer_top_k_wrapper=topk)
    return module


class OnCpu(torch.overrides.TorchFunctionMode):
    """Within the block, calls that would make tensors on "cuda" make them on the CPU."""

    def __torch_function__(self, function: Callable, types: tuple, arguments: tuple = (), options: dict | None = None):
        options = dict(options or {})
        if function is torch.Tensor.cuda:
            return arguments[0]
        if options.get("device") == "cuda":
            options["device"] = "cpu"
        return function(*arguments, **options)
