"""Test SGLang's indexer with the plugin: scores and selection in decoding, for drafts and for prompts."""

import contextlib
import inspect
import textwrap
from types import SimpleNamespace

import pytest
import torch

from dsa_engines.sglang import adapters, seams
from tests.engines.sglang import batches
from tests.engines.sglang.batches import E4M3, PAGE, int32
from tests.engines.sglang.engine.process import index_cache, module


def indexer_of(served, pool, monkeypatch):
    """Return SGLang's indexer without weights, set up as on a CUDA GPU."""
    indexer = module(seams.INDEXER)
    paged = module("sglang.kernels.ops.attention.dsa.paged_mqa_logits")
    for name in ("deepgemm_paged_mqa_logits_native", "deepgemm_paged_mqa_logits_split"):
        monkeypatch.setattr(indexer, name, getattr(paged, name))
    monkeypatch.setattr(indexer, "_is_cuda", True)
    monkeypatch.setattr(indexer, "get_token_to_kv_pool", lambda: pool)
    made = indexer.Indexer.__new__(indexer.Indexer)
    torch.nn.Module.__init__(made)
    made.paged_mqa_logits_backend = module(
        "sglang.srt.layers.attention.dsa.paged_mqa_logits_backend"
    ).DSAPagedMQALogitsBackend.DEEPGEMM
    made.sm_count, made.n_heads, made.index_topk, made.num_init_tokens, made.num_local_tokens = 3, 32, 16, 0, 0
    made.logits_with_pp_recv = False
    return made


def metadata_of(served, method, **more):
    topk = module(seams.TOPK)
    common = {"page_size": PAGE, "page_table_1": None, "token_to_batch_idx": None, "topk_indices_offset": None}
    attention = SimpleNamespace(**common | {"cu_seqlens_q": None, "indexer_logical_page_table": None} | more)
    return module(seams.METADATA).DSAIndexerMetadata(
        attn_metadata=attention,
        topk_transform_method=topk.TopkTransformMethod[method],
        topk_backend=topk.DSATopKBackend.SGL_KERNEL,
        paged_mqa_ctx_lens_2d=more.get("context_lens"),
    )


def mode(name):
    return module("sglang.srt.model_executor.forward_batch_info").ForwardMode[name]


def expected_slots(q, weights, k, k_scale, table, visible):
    """Return the cache slots of the 16 best keys for each token t, which sees visible[t] keys in the pages table[t]."""
    rows = []
    for t, length in enumerate(visible):
        slots = batches.slots_of(table, t, length)
        row = batches.index_scores(q[t : t + 1], k[slots], k_scale[slots], weights[t : t + 1])[0].float()
        rows.append([-1 if s < 0 else slots[s].item() for s in batches.selected(row, 16)])
    return rows


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_sglangs_indexer_decodes_and_verifies(served, next_n, monkeypatch):
    """SGLang scores at most as many sequences per call as the GPU has SMs, here 3. The batch has more."""
    lengths = [5, 64, 0, 130, 200] if next_n == 1 else [5, 64, 130, 200]
    table, pages = batches.paged(lengths)
    cache, k, k_scale = index_cache(pages)
    pool = SimpleNamespace(index_page_size=PAGE, get_index_k_with_scale_buffer=lambda layer_id: cache)
    indexer = indexer_of(served, pool, monkeypatch)
    visible = [max(n - next_n + 1 + i, 0) for n in lengths for i in range(next_n)]
    table = table.repeat_interleave(next_n, 0)
    q, weights = torch.randn(len(visible), 32, 128).to(E4M3), torch.randn(len(visible), 32)
    forward = mode("DECODE" if next_n == 1 else "TARGET_VERIFY")
    served.backend.speculative_num_draft_tokens = next_n
    context_lens = served.backend._build_paged_mqa_schedule_2d_ctx_lens(
        forward_mode=forward,
        cache_seqlens_int32=int32(lengths),
        seqlens_expanded=int32(visible),
        batch_size=len(lengths),
    )
    assert context_lens.shape == (len(lengths), next_n)
    metadata = metadata_of(
        served,
        "PAGED",
        real_page_table=table,
        context_lens=context_lens,
        cache_seqlens_int32=int32(lengths),
        dsa_seqlens_expanded=int32(visible),
        dsa_extend_seq_lens_list=[next_n] * len(lengths),
    )
    calls, scores = [], adapters.fp8_paged_mqa_logits

    def record(q, *given, **more):
        calls.append(q.shape)
        return scores(q, *given, **more)

    monkeypatch.setattr(module(seams.INDEXER), "resolve_fp8_paged_mqa_logits_fn", lambda: record)
    batch = SimpleNamespace(forward_mode=forward)
    got = indexer._get_topk_paged(batch, 0, q, weights.unsqueeze(2), metadata)
    assert got.tolist() == expected_slots(q, weights, k, k_scale, table, visible)
    assert calls == [(n, next_n, 32, 128) for n in ((3, 2) if next_n == 1 else (3, 1))]


def without_device_index(function):
    """Return `Indexer._get_topk_ragged`, changed to assert that the device has no index, because a CPU device has
    none."""
    source = textwrap.dedent(inspect.getsource(function))
    changed = source.replace("assert device_index is not None", "assert device_index is None")
    assert changed != source
    space = {}
    exec(changed, vars(module(seams.INDEXER)) | {}, space)
    return space[function.__name__]


@pytest.mark.parametrize("method", ["PAGED", "RAGGED"])
@pytest.mark.parametrize("chunked", [False, True])
def test_sglangs_indexer_prefills(served, method, chunked, monkeypatch):
    prefixes, lengths = [0, 30, 5], [4, 36, 9]
    owners = [b for b, (p, n) in enumerate(zip(prefixes, lengths)) for _ in range(p, n)]
    visible = [s + 1 for p, n in zip(prefixes, lengths) for s in range(p, n)]
    starts = int32([sum(lengths[:b]) for b in owners])
    table, _ = batches.paged(lengths)
    k, k_scale = batches.index_keys(sum(lengths))
    gathered = k.view(torch.uint8), k_scale.view(torch.uint8).view(-1, 4)
    pool = SimpleNamespace(index_page_size=PAGE, get_index_k_scale_buffer=lambda *given: gathered)
    indexer = indexer_of(served, pool, monkeypatch)
    indexer.__dict__["_with_real_sm_count"] = contextlib.nullcontext
    indexer.__dict__["_get_mqa_logits_budget_bytes"] = lambda device: 0
    budget = 5 * sum(lengths) * indexer._MQA_LOGITS_BYTES_PER_ELEM
    monkeypatch.setattr(module(seams.INDEXER), "mqa_logits_should_chunk", lambda **given: (chunked, budget))
    metadata = metadata_of(
        served,
        method,
        real_page_table=table,
        indexer_k_start_end=(starts, starts + int32(visible)),
        indexer_seq_lens_cpu=torch.tensor(lengths),
        indexer_seq_lens=int32(lengths),
        dsa_seqlens_expanded=int32(visible),
        token_to_batch_idx=int32(owners),
        topk_indices_offset=starts if method == "RAGGED" else None,
    )
    q, weights = torch.randn(len(owners) + 2, 32, 128).to(E4M3), torch.randn(len(owners) + 2, 32)
    batch = SimpleNamespace(forward_mode=mode("EXTEND"), seq_lens_cpu=lengths, extend_seq_lens_cpu=lengths)
    run = without_device_index(type(indexer)._get_topk_ragged)
    got = run(indexer, False, batch, 0, q, weights.unsqueeze(2), metadata)
    for t, (owner, begin, n) in enumerate(zip(owners, starts.tolist(), visible)):
        part = slice(begin, begin + n)
        row = batches.index_scores(q[t : t + 1], k[part], k_scale[part], weights[t : t + 1])[0].float()
        slots = batches.slots_of(table, owner, n).tolist()
        places = slots if method == "PAGED" else range(begin, begin + n)
        assert got[t].tolist() == [-1 if s < 0 else places[s] for s in batches.selected(row, 16)]
    assert (got[len(owners) :] == -1).all()


@pytest.mark.parametrize("method", ["PAGED", "RAGGED"])
def test_sglangs_metadata_selects_all_keys_without_scores(served, method):
    """`Indexer._forward_cuda_k_only` passes zeros as scores when all keys are selected."""
    lengths, owners = int32([1, 2, 1, 2, 3]), int32([0, 0, 1, 1, 1])
    table, _ = batches.paged([2, 3])
    offsets = int32([0, 0, 2, 2, 2])
    metadata = metadata_of(
        served,
        method,
        real_page_table=table,
        dsa_seqlens_expanded=lengths,
        token_to_batch_idx=owners,
        topk_indices_offset=offsets if method == "RAGGED" else None,
    )
    got = metadata.topk_transform(torch.zeros(5, 16), 16)
    for t, n in enumerate(lengths.tolist()):
        slots = batches.slots_of(table, owners[t], n).tolist()
        want = slots if method == "PAGED" else list(range(offsets[t], offsets[t] + n))
        assert got[t].tolist() == [*want, *[-1] * (16 - n)]
