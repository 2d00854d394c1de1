"""Test SGLang's attention backend of V3.2 and GLM-5 with the plugin: decoding, prompts and the plan."""

from types import SimpleNamespace

import pytest
import torch

from dsa_engines.sglang import seams
from tests.engines.sglang import batches
from tests.engines.sglang.batches import BF16, INT32, int32
from tests.engines.sglang.engine.process import module
from tests.engines.sglang.test_hooks import BF16_POOL, FP8_POOL


def a_layer():
    names = {"tp_q_head_num": 8, "head_dim": 576, "v_head_dim": 512, "layer_id": 0, "scaling": 0.1}
    return SimpleNamespace(**names, is_cross_attention=False)


def as_made(served, monkeypatch, pool, prefill, decode, cache, metadata):
    """Return V3.2's backend with the attributes that its constructor sets for a model without drafts. `cache` is every
    layer's cache."""
    backend = served.backend
    topk = module(seams.TOPK).DSATopKBackend.SGL_KERNEL
    given = {"dsa_prefill_impl": prefill, "dsa_decode_impl": decode, "use_fused_topk": True, "dsa_index_kpool": 1}
    given |= {"hisparse_coordinator": None, "dsa_topk_backend": topk, "use_mha": False, "forward_metadata": metadata}
    given |= {"kv_cache_dim": pool.kv_cache_dim, "dsa_kv_cache_store_fp8": pool.dsa_kv_cache_store_fp8}
    given["token_to_kv_pool"] = SimpleNamespace(**vars(pool), get_key_buffer=lambda layer_id: cache)
    for name, value in given.items():
        monkeypatch.setattr(backend, name, value, raising=False)
    return backend


@pytest.mark.parametrize("pool", [FP8_POOL, BF16_POOL], ids=["fp8", "bf16"])
@pytest.mark.parametrize("implementation", ["flashmla_kv", "flashmla_sparse"])
@pytest.mark.parametrize("verify", [False, True])
def test_sglangs_decoding(served, pool, implementation, verify, monkeypatch):
    if (pool, implementation) == (FP8_POOL, "flashmla_sparse"):
        pytest.skip("SGLang does not attend so")
    cache, rows = batches.latent_cache(pool.kv_cache_dim, 3)
    q, slots = torch.randn(4, 8, 576).to(BF16), torch.randint(0, 192, (4, 16), dtype=INT32)
    slots[1, 5:] = -1
    lengths = int32([16, 5, 16, 16])
    plan = served.backend._compute_flashmla_metadata(cache_seqlens=int32([16] * 8), seq_len_q=1).slice(slice(0, 5))
    plan.copy_(served.backend._compute_flashmla_metadata(cache_seqlens=lengths, seq_len_q=1))
    metadata = SimpleNamespace(dsa_cache_seqlens_int32=lengths, flashmla_metadata=plan)
    flat = cache.view(-1, 1, pool.kv_cache_dim)
    backend = as_made(served, monkeypatch, pool, "fa3", implementation, flat, metadata)
    mode = module("sglang.srt.model_executor.forward_batch_info").ForwardMode
    batch = SimpleNamespace(forward_mode=mode.TARGET_VERIFY if verify else mode.DECODE)
    forward = backend.forward_extend if verify else backend.forward_decode
    got = forward(q.flatten(1), None, None, a_layer(), batch, save_kv_cache=False, topk_indices=slots)
    want, *_ = batches.attention(q, rows, slots, 0.1)
    assert (got.view(4, 8, 512).double() - want).abs().max() < 2e-2


def test_sglangs_prompts(served, monkeypatch):
    """Test `forward_extend` without a cached prefix. The batch itself has computed all selected keys, in bf16."""
    k, k_rope = torch.randn(9, 1, 512).to(BF16), torch.randn(9, 1, 64).to(BF16)
    q, columns = torch.randn(9, 8, 576).to(BF16), torch.full((9, 16), -1, dtype=INT32)
    for t, (begin, n) in enumerate([(0, n) for n in range(1, 6)] + [(5, n) for n in range(1, 5)]):
        columns[t, :n] = torch.arange(begin, begin + n)
    metadata = SimpleNamespace(dsa_cache_seqlens_int32=int32([1, 2, 3, 4, 5, 1, 2, 3, 4]), topk_indices_offset=None)
    backend = as_made(served, monkeypatch, FP8_POOL, "flashmla_sparse", "flashmla_kv", None, metadata)
    monkeypatch.setattr(module(seams.BACKEND), "_compiled_cat", torch.cat)
    mode = module("sglang.srt.model_executor.forward_batch_info").ForwardMode
    batch = SimpleNamespace(forward_mode=mode.EXTEND, extend_prefix_lens_cpu=[0, 0])
    given = {"save_kv_cache": False, "topk_indices": columns, "k_rope": k_rope}
    got = backend.forward_extend(q.flatten(1), k, k, a_layer(), batch, **given)
    want, *_ = batches.attention(q, torch.cat([k, k_rope], -1).squeeze(1), columns, 0.1)
    assert (got.double() - want).abs().max() < 2e-2
