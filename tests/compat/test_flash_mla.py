"""FlashMLA's signatures over the ops, on the CPU: its own tests' cases, smaller, and its callers' ways."""

import inspect
import math

import pytest
import torch

import dsa
from dsa.cases.attention import attend_lists
from dsa.compat import flash_mla
from dsa.reference.cache import kv_cache
from dsa.testing import assert_close
from tests.reference.common import assert_refused, i32

BF16, INT32, D_V = torch.bfloat16, torch.int32, 512


def attend(q, keys, scale, sink=None):
    """In float64: out [h, d_v], lse [h] and largest logits [h] of a query [h, d] over keys [n, d]."""
    found = attend_lists(q[None], keys, torch.arange(len(keys))[None], scale, D_V, sink)
    return [x[0] for x in found[:3]]


def assert_attention(got, q, keys, scale, sink=None, abs_tol=8e-4):
    """(out [h, d_v], lse [h]) of one query are those of float64."""
    out, lse, _ = attend(q, keys, scale, sink)
    assert_close("out", got[0], out, abs_tol=abs_tol, rel_tol=3.01 / 128, cos_tol=7e-6)
    assert_close("lse", got[1], lse, abs_tol=1e-6, rel_tol=8.01 / 65536)


@pytest.mark.parametrize("h_q", [16, 128])
@pytest.mark.parametrize(("s_q", "causal"), [(1, False), (2, True)])
@pytest.mark.parametrize("is_varlen", [False, True])
@pytest.mark.parametrize("test_zero", [False, True])
def test_dense_decoding(h_q, s_q, causal, is_varlen, test_zero):
    """`test_flash_mla_dense_decoding.py`: its batches of 4096 keys and more by 64 heads are smaller here."""
    batch, mean, page, d = 3, 200, 64, 576
    lengths = [mean, 7 if is_varlen else mean, 0 if test_zero else mean]
    used = [-(-n // page) for n in lengths]
    table = torch.full((batch, max(used) + 1), -1, dtype=INT32)
    order, cache = torch.randperm(sum(used) + 1), torch.full((sum(used) + 1, page, 1, d), math.nan, dtype=BF16)
    q = (torch.randn(batch, s_q, h_q, d) / 10).clamp(-1, 1).to(BF16)
    keys = []
    for b, n in enumerate(lengths):
        table[b, : used[b]] = order[sum(used[:b]) : sum(used[: b + 1])]
        slots = (table[b, : used[b], None].long() * page + torch.arange(page)).view(-1)[:n]
        cache.view(-1, d)[slots] = (torch.randn(n, d) / 10).clamp(-1, 1).to(BF16)
        keys.append(cache.view(-1, d)[slots])
    meta, num_splits = flash_mla.get_mla_metadata()
    for _ in range(2):
        out, lse = flash_mla.flash_mla_with_kvcache(q, cache, table, i32(lengths), D_V, meta, num_splits, causal=causal)
    assert out.shape == (batch, s_q, h_q, D_V) and lse.shape == (batch, h_q, s_q) and lse.is_contiguous()
    for b, n in enumerate(lengths):
        for i in range(s_q):
            seen = max(0, n - s_q + i + 1) if causal else n
            assert_attention((out[b, i], lse[b, :, i]), q[b, i], keys[b][:seen], d**-0.5)


def sparse_inputs(d, batch=2, s_q=2, h_q=64, top_k=40, page=16, rows=96):
    """q, a cache of bytes, and indices, some of which are no keys."""
    cache = torch.zeros(rows // page, page, 1, 656, dtype=torch.uint8)
    cache = cache if d == 576 else kv_cache.make_v4_cache(rows // page, page)
    kv_cache.write_kv_cache((torch.randn(rows, d) / 10).clamp(-1, 1), cache, torch.arange(rows))
    indices = torch.rand(batch, s_q, rows).argsort(2)[..., :top_k].to(INT32)
    indices[..., ::7] = -1
    return (torch.randn(batch, s_q, h_q, d) / 10).to(BF16), cache, indices


@pytest.mark.parametrize("d", [576, 512])
@pytest.mark.parametrize("have_attn_sink", [False, True])
@pytest.mark.parametrize("have_topk_length", [False, True])
@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("use_legacy", [False, True])
def test_sparse_decoding(d, have_attn_sink, have_topk_length, extra, use_legacy):
    """`test_flash_mla_sparse_decoding.py` by the parameters of its `RawTestParamForDecode`, by position."""
    q, cache, indices = sparse_inputs(d)
    lengths = i32([0, 13]) if have_topk_length else None
    sink = torch.tensor([-math.inf, math.inf, 0.5, 1.0] * 16) if have_attn_sink else None
    (_, more_cache, more), scale = sparse_inputs(d, page=8, rows=24, top_k=9), d**-0.55
    arguments = (q, cache, None, None, D_V, flash_mla.get_mla_metadata()[0], None, scale, False, True, indices, sink)
    if extra:
        arguments += (more_cache, more, lengths, i32([9, 0]))
    else:
        arguments += (None, None, lengths, None)
    out, lse = flash_mla.flash_mla_with_kvcache(*arguments, use_legacy=use_legacy)
    assert lse.shape == (2, 64, 2) and lse.transpose(1, 2).is_contiguous()
    named = {"k_cache": cache, "block_table": None, "cache_seqlens": None, "tile_scheduler_metadata": None}
    named |= {"head_dim_v": D_V, "softmax_scale": scale, "indices": indices, "attn_sink": sink, "topk_length": lengths}
    if extra:
        named |= {"extra_k_cache": more_cache, "extra_indices_in_kvcache": more, "extra_topk_length": i32([9, 0])}
    expected = dsa.flash_mla_with_kvcache(q, **named, is_fp8_kvcache=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize("d", [576, 512])
@pytest.mark.parametrize("have_attn_sink", [False, True])
@pytest.mark.parametrize("have_topk_length", [False, True])
@pytest.mark.parametrize("is_all_indices_invalid", [False, True])
def test_sparse_prefill(d, have_attn_sink, have_topk_length, is_all_indices_invalid):
    """`test_flash_mla_sparse_prefill.py` by the parameters of its `TestParam`."""
    s_q, s_kv, h_q, top_k = 4, 50, 64, 33
    q, kv = ((torch.randn(*shape) / 10).to(BF16) for shape in ((s_q, h_q, d), (s_kv, 1, d)))
    invalid = i32([-(2**31), -123456, -1, s_kv, 114514, 2147480000, 2**31 - 1])
    indices = torch.rand(s_q, s_kv).argsort(1)[:, None, :top_k].to(INT32)
    indices[:, :, 3::5] = invalid.repeat(1 + top_k)[: s_q * len(range(3, top_k, 5))].view(s_q, 1, -1)
    if is_all_indices_invalid:
        indices[1:3] = invalid[2]
    lengths = i32([0, top_k, 5, 20]) if have_topk_length else None
    sink = torch.tensor([-math.inf, math.inf, 0.5, 1.0] * 16) if have_attn_sink else None
    got = flash_mla.flash_mla_sparse_fwd(q, kv, indices, sm_scale=0.5, attn_sink=sink, topk_length=lengths)
    for t in range(s_q):
        listed = indices[t, 0, : top_k if lengths is None else lengths[t]]
        keys = kv[listed[(listed >= 0) & (listed < s_kv)].long(), 0]
        assert_attention((got[0][t], got[2][t]), q[t], keys, 0.5, sink)
        assert_close("max_logits", got[1][t], attend(q[t], keys, 0.5)[2], abs_tol=1e-6, rel_tol=2.01 / 65536)
    log2 = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.5, D_V, sink, lengths, return_log2_lse=True)
    assert torch.equal(log2[0], got[0])
    for x, y in zip(log2[1:], got[1:], strict=True):
        torch.testing.assert_close(x, y / math.log(2))
    options = {"attn_sink": sink, "topk_length": lengths, "return_log2_lse": False}
    alone = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.5, enable_batch_invariant=True, indexer_topk=0, **options)
    assert torch.equal(alone[0], got[0]) and alone[1:] == (None, None)
    for changes, message in (
        ({"enable_batch_invariant": 1}, "enable_batch_invariant: must be True or False, got int"),
        ({"indexer_topk": 64}, "indexer_topk: must be 0, got 64"),
    ):
        assert_refused(message, flash_mla.flash_mla_sparse_fwd, q, kv, indices, 0.5, **changes)


def test_metadata_as_callers_of_any_age_ask_for_it():
    lengths = i32([5, 70])
    for arguments, named in (((), {}), ((lengths, 8, 1), {}), ((), {"cache_seqlens": lengths, "topk": 4})):
        meta, num_splits = flash_mla.get_mla_metadata(*arguments, **named)
        assert meta == flash_mla.FlashMLASchedMeta() and num_splits is None
    plan = flash_mla.get_mla_decoding_metadata(lengths, 8, 1, use_legacy=True)
    assert [x.tolist() for x in plan] == [x.tolist() for x in dsa.get_mla_metadata(lengths, 8, 1)]
    q, cache = torch.randn(2, 1, 8, 576).to(BF16), torch.randn(9, 16, 1, 576).to(BF16)
    table = torch.randperm(9)[:8].view(2, 4).to(INT32)
    lengths = i32([5, 60])
    expected = dsa.flash_mla_with_kvcache(q, cache, table, lengths, D_V, None)
    held = flash_mla.FlashMLASchedMeta(tile_scheduler_metadata=plan[0], num_splits=plan[1])
    for given in (plan, (held, None), flash_mla.get_mla_metadata(lengths, 8, 1)):
        got = flash_mla.flash_mla_with_kvcache(q, cache, table, lengths, D_V, *given)
        assert all(map(torch.equal, got, expected))


def test_what_the_copies_have_besides():
    q, cache, indices = sparse_inputs(576)
    meta = flash_mla.FlashMLASchedMeta()
    expected = flash_mla.flash_mla_with_kvcache(q, cache, None, None, D_V, meta, indices=indices)
    whole = torch.zeros(2, 2, 70, D_V, dtype=BF16)
    out, lse = flash_mla.flash_mla_with_kvcache(
        *(q, cache, None, None, D_V, meta),
        is_fp8_kvcache=True,
        indices=indices,
        out=whole[:, :, :64],
        enable_batch_invariant=True,
    )
    assert out.data_ptr() == whole.data_ptr() and torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    for changes, message in (
        ({"kv_format": "V32_NO_ROPE"}, "kv_format: must be None, got V32_NO_ROPE"),
        ({"descale_q": lse}, "descale_q: must be None, got Tensor"),
        ({"use_legacy": 1}, "use_legacy: must be True or False, got int"),
        ({"is_fp8_kvcache": False}, "k_cache: dtype must be float32"),
    ):
        arguments = (q, cache, None, None, D_V, meta)
        assert_refused(message, flash_mla.flash_mla_with_kvcache, *arguments, indices=indices, **changes)


def test_what_a_position_means_is_the_same_in_all_copies():
    """Where they differ, an argument has no position."""
    common = {
        "flash_mla_with_kvcache": "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits "
        "softmax_scale causal is_fp8_kvcache indices attn_sink extra_k_cache extra_indices_in_kvcache topk_length "
        "extra_topk_length",
        "flash_mla_sparse_fwd": "q kv indices sm_scale d_v attn_sink topk_length",
        "get_mla_decoding_metadata": "seqlens_k num_q_tokens_per_head_k h_k h_q is_fp8_kvcache topk use_legacy",
    }
    for name, positions in common.items():
        parameters = inspect.signature(getattr(flash_mla, name)).parameters.values()
        assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == positions.split()
