"""Test SGLang's DeepSeek-V4 with the plugin."""

import functools
from types import SimpleNamespace

import pytest
import torch

from dsa_engines.sglang import seams
from tests.engines.sglang import batches
from tests.engines.sglang.batches import BF16, E4M3, INT32, PAGE, int32
from tests.engines.sglang.engine.process import index_cache, module


def test_v4_scores_of_a_prompt(served):
    """`_nonpaged_mqa_logits` imports DeepGEMM in each call. The first query selects all 9 keys that it sees, so SGLang
    passes an empty range of keys to score."""
    k, k_scale = batches.index_keys(70)
    q, weights = torch.randn(3, 64, 128).to(E4M3), torch.randn(3, 64)
    plan = SimpleNamespace(ks=int32([0, 0, 0]), ke=int32([0, 40, 70]), max_seqlen_k=128)
    mixin = module(seams.V4_INDEXER).C4IndexerBackendMixin
    given = {"q_indexer": q, "weights": weights, "kv": (k, k_scale), "plan": plan, "rows": slice(0, 3)}
    logits = mixin._nonpaged_mqa_logits(**given)
    out, raw = (torch.full((3, 16), 7, dtype=INT32) for _ in range(2))
    table, lengths = torch.arange(6, dtype=INT32).view(3, 2), int32([9, 40, 70])
    module(seams.V4_INDEXER).topk_transform_paged_v2(logits, lengths, table, out, PAGE, None, raw)
    want = batches.index_scores(q, k, k_scale, weights).float()
    assert raw[0].tolist() == [*range(9), *[-1] * 7]
    for t in (1, 2):
        assert raw[t].tolist() == batches.selected(want[t, : lengths[t]], 16)
    assert torch.equal(out[:2], torch.where(raw < 0, -1, raw + 2 * PAGE * torch.arange(3)[:, None]).int()[:2])


def test_v4s_model_keeps_its_number_of_heads(served):
    attention = SimpleNamespace(attn_tp_size=8, n_local_heads=16)
    assert module(seams.V4_MODEL).MqaAttentionBase._kernel_num_heads(attention, 5) == 16


def v4_backend():
    return object.__new__(module(seams.V4_BACKEND).DeepseekV4AttnBackend)


def decode_mode():
    return module("sglang.srt.model_executor.forward_batch_info").ForwardMode.DECODE


@pytest.mark.parametrize("with_positions", [False, True])
def test_v4s_indexer_decodes(served, with_positions, monkeypatch):
    indexer, lengths = module(seams.V4_INDEXER), [1, 70, 128]
    table, pages = batches.paged(lengths)
    cache, k, k_scale = index_cache(pages)
    q, weights = torch.randn(3, 64, 128).to(E4M3), torch.randn(3, 64)
    monkeypatch.setattr(indexer, "get_global_indexer_capturer", lambda: None)
    metadata = module(f"{seams.ATTENTION}.dsv4.metadata").PagedIndexerMetadata(
        page_size=256,
        compressed_page_size=PAGE,
        page_table=table,
        compressed_seq_lens=int32(lengths),
        use_topk_v2=False,
    )
    slots, positions = (torch.full((3, 64), 7, dtype=INT32) for _ in range(2))
    core = SimpleNamespace(positions=int32([3, 280, 515]), c4_sparse_page_indices=slots)
    core.c4_sparse_raw_indices = positions if with_positions else None
    backend = v4_backend()
    backend.token_to_kv_pool = SimpleNamespace(get_index_k_with_scale_buffer=lambda layer_id: cache)
    backend.forward_metadata = SimpleNamespace(indexer_metadata=metadata, core_metadata=core)
    backend.dsa_topk_backend = module(seams.TOPK).DSATopKBackend.SGL_KERNEL
    backend.hisparse_coordinator, backend.debug_use_external_c4_sparse_indices = None, False
    backend._forward_prepare_normal = lambda **given: (q, weights.unsqueeze(2))
    layer = SimpleNamespace(use_fp4_indexer=False, layer_id=0)
    hidden = torch.zeros(3, 1)
    backend.forward_c4_indexer(hidden, hidden, layer, SimpleNamespace(forward_mode=decode_mode()))
    for t, length in enumerate(lengths):
        places = batches.slots_of(table, t, length)
        row = batches.index_scores(q[t : t + 1], k[places], k_scale[places], weights[t : t + 1])[0].float()
        best = batches.selected(row, 64)
        assert slots[t].tolist() == [-1 if s < 0 else places[s].item() for s in best]
        assert positions[t].tolist() == (best if with_positions else [7] * 64)


@pytest.mark.parametrize("ratio", [0, 4])
def test_v4s_backend_decodes(served, ratio, monkeypatch):
    v4 = module(seams.V4_BACKEND)
    monkeypatch.setattr(v4, "get_platform", lambda: SimpleNamespace(is_sm100=False, is_sm120=False))
    (window, rows), (entries, more) = batches.latent_cache(584, 2), batches.latent_cache(584, 3)
    pool = object.__new__(v4.DeepSeekV4TokenToKVPool)
    pool.get_swa_key_buffer_radix = lambda layer_id: window.as_strided((2, window.stride(0)), (window.stride(0), 1))
    pool.get_extra_key_buffer = lambda layer_id: entries.as_strided((3, entries.stride(0)), (entries.stride(0), 1))
    pool.get_swa_key_page_size = lambda: PAGE
    pool.get_extra_key_page_size = lambda layer_id: PAGE
    pool.get_swa_key_bytes_per_token = lambda: 584
    pool.get_extra_key_bytes_per_token = lambda layer_id: 584
    core = object.__new__(v4.DSV4AttnMetadata)
    core.swa_page_indices, core.swa_topk_lengths = torch.randint(0, 128, (3, 128), dtype=INT32), int32([128, 5, 1])
    core.c4_sparse_page_indices, core.c4_sparse_topk_lengths = (
        torch.randint(0, 192, (3, 64), dtype=INT32),
        int32([64, 9, 1]),
    )
    core.c0_flashmla_metadata = core.c4_flashmla_metadata = object()
    backend = v4_backend()
    backend.token_to_kv_pool, backend.forward_metadata = pool, SimpleNamespace(core_attn_metadata=core)
    backend.mtp_enabled = backend.is_dsv41 = backend.trtllm_attn = False
    backend.head_dim_v, backend.softmax_scale = 512, 0.04
    interface = module(seams.FLASH_MLA)
    backend._flash_mla_with_kvcache = functools.partial(interface.flash_mla_with_kvcache, use_legacy=True)
    q, kv, sink = torch.randn(3, 8, 512).to(BF16), torch.zeros(3, 512), torch.randn(8)
    batch, layer = SimpleNamespace(forward_mode=decode_mode()), SimpleNamespace(layer_id=0, tp_q_head_num=8)
    got = backend._forward_attention(q, kv, kv, layer, batch, ratio, save_kv_cache=False, attn_sink=sink)
    used = [
        index.masked_fill(torch.arange(index.shape[1]) >= count[:, None], -1)
        for index, count in (
            (core.swa_page_indices, core.swa_topk_lengths),
            (core.c4_sparse_page_indices, core.c4_sparse_topk_lengths),
        )
    ]
    want, *_ = batches.attention(q, rows, used[0], 0.04, sink, (more, used[1]) if ratio else None)
    assert (got.double() - want).abs().max() < 2e-2
