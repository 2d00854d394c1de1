"""vLLM's sparse_attn_indexer with the plugin."""

import types

import pytest
import torch

import dsa
from dsa_engines.vllm import seams
from tests.engines.vllm import engine
from tests.engines.vllm.engine import PAGE, HopperPlatform, int32, needs_vllm, slots_of

pytestmark = needs_vllm
DIM, TOPK, PAGES = 128, 256, 48


def module(name):
    return __import__(name, fromlist=["_"])


@pytest.fixture
def indexer(plugin, monkeypatch):
    """Yield an object with vLLM's `module`. The test sets `metadata`, which vLLM reads as a layer's metadata."""
    from vllm.config import CUDAGraphMode

    torch.manual_seed(0)
    sai, topk, workspace = module(seams.INDEXER), module(seams.TOPK), module("vllm.v1.worker.workspace")
    given = types.SimpleNamespace(module=sai, metadata=None)
    monkeypatch.setattr(
        sai,
        "get_forward_context",
        lambda: types.SimpleNamespace(
            attn_metadata={"layer": given.metadata}, cudagraph_runtime_mode=CUDAGraphMode.NONE
        ),
    )
    monkeypatch.setattr(sai, "current_platform", HopperPlatform)
    monkeypatch.setattr(topk, "current_platform", HopperPlatform)
    monkeypatch.setattr(sai, "_resolve_layer_name", lambda name: name)
    monkeypatch.setattr(sai, "pack_seq_triton", engine.pack)
    monkeypatch.setattr(sai, "unpack_seq_triton", engine.unpack)
    monkeypatch.setattr(workspace, "_manager", engine.workspaces())
    yield given
    topk.get_indexer_topk.cache_clear()


class Cache:
    def __init__(self, requests, heads):
        self.heads = heads
        self.k, scale = dsa.per_token_cast_to_fp8(torch.randn(PAGES * PAGE, DIM), use_ue8m0=True)
        self.scale = scale.view(-1)
        self.pages = torch.zeros(PAGES, PAGE, DIM + 4, dtype=torch.uint8)
        dsa.write_indexer_cache(self.k, self.scale, self.pages.unsqueeze(2), torch.arange(PAGES * PAGE))
        self.table = torch.randperm(PAGES)[: requests * (PAGES // requests)].view(requests, -1).int()

    def queries(self, tokens):
        return torch.randn(tokens, self.heads, DIM).to(torch.float8_e4m3fn), torch.randn(tokens, self.heads)

    def scores(self, q, weights, request, length):
        slots = slots_of(self.table, request, length)
        keys = self.k[slots].double() * self.scale[slots].double()[:, None]
        return (weights.double()[:, None] * (q.double() @ keys.T).relu()).sum(0)


def call(indexer, cache, q, weights, buffer, **options):
    function = getattr(indexer.module.sparse_attn_indexer, "__wrapped__", indexer.module.sparse_attn_indexer)
    hidden = torch.zeros(len(q), 8)
    function(
        *(hidden, "layer", cache, q, None, None, weights, DIM, "ue8m0", TOPK, DIM, 4096, 4096, buffer, True),
        **({"use_pcp": False, "pcp_shard_decode_requests": False, "dense_mha_metadata_layer_name": ""} | options),
    )


def decode_metadata(table, lengths, next_n, lens=None, global_lengths=None):
    """Return metadata as vLLM's builder makes it.

    lengths [B, next_n]: the number of keys that each query sees. lens [B]: the number of queries per sequence, if it
    varies. `schedule_metadata`, the plan of the paged scores, has 133 rows, like the builder's buffer.
    """
    indexer, gemm = module(seams.PLAN), module(seams.DEEP_GEMM)
    scheduled = torch.full((133, 2), -9, dtype=torch.int32)
    scheduled[:] = gemm.get_paged_mqa_logits_metadata(lengths, PAGE, 132)
    return indexer.DeepSeekV32IndexerDecodeMetadata(
        block_table=table,
        seq_lens=lengths,
        decode_lens=torch.full((len(table),), next_n, dtype=torch.int32) if lens is None else lens,
        requires_padding=lens is not None,
        schedule_metadata=scheduled,
        global_seq_lens=global_lengths,
    )


def prefill_metadata(table, first, tokens, lengths, visible=None):
    """Return metadata of one chunk of prompts. Request b has lengths[b] keys, and its last tokens[b] tokens are
    queries.

    `first` is the index of the first query in the batch. visible: for each query, the number of keys that it sees on
    this rank. By default, a query sees the keys up to its own.
    """
    if visible is None:
        visible = [n - count + 1 + i for count, n in zip(tokens, lengths) for i in range(count)]
    plan = module(seams.PLAN)
    ends = int32([0, *torch.tensor(lengths).cumsum(0).tolist()])
    starts = [int(ends[b]) for b, count in enumerate(tokens) for _ in range(count)]
    stops = [start + count for start, count in zip(starts, visible)]
    total = int(ends[-1])
    chunk = plan.DeepseekV32IndexerPrefillChunkMetadata(
        block_table=table,
        cu_seqlen_ks=int32(starts),
        cu_seqlen_ke=int32(stops),
        cu_seq_lens=ends,
        token_to_seq=torch.zeros(total, dtype=torch.int32),
        total_seq_lens=total,
        max_seqlen_k=max(lengths),
        token_start=first,
        token_end=first + len(starts),
        num_reqs=len(lengths),
        local_cu_seq_lens=ends,
        local_total_seq_lens=total,
        max_local_total_seq_lens=total + 3,  # larger than total, because the workspaces of all ranks have equal sizes
    )
    return plan.DeepseekV32IndexerPrefillMetadata([chunk])


def metadata(decode, prefill, decodes, decode_tokens, prefills, tokens):
    return module(seams.PLAN).DeepseekV32IndexerMetadata(
        seq_lens=torch.zeros(0),
        max_seq_len=1500,
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        num_decodes=decodes,
        num_decode_tokens=decode_tokens,
        num_prefills=prefills,
        num_prefill_tokens=tokens - decode_tokens,
        decode=decode,
        prefill=prefill,
    )


def check(found, scores):
    """Check that a row has the TOPK best keys, or all keys if there are fewer, and then -1. Among nearly equal scores,
    any key can be selected."""
    count = min(TOPK, len(scores))
    selected = found[found >= 0]
    assert len(selected) == count == len(selected.unique()) and (found[count:] == -1).all()
    assert torch.equal(selected, selected.sort().values)  # the order depends only on which keys are selected
    if count:
        worst, best = scores[selected.long()].min(), scores.topk(count).values.min()
        assert worst >= best - 1e-4 * scores.abs().max()


@pytest.mark.parametrize(("next_n", "heads"), [(1, 64), (2, 32), (3, 64), (4, 64)])
def test_prompts_and_decoding_in_one_batch(indexer, next_n, heads):
    cache = Cache(4, heads)
    lengths, prompts, contexts = torch.tensor([700, 130]), [33, 5], [400, 300]
    decode_tokens, tokens = 2 * next_n, 2 * next_n + sum(prompts)
    q, weights = cache.queries(tokens)
    each = (lengths[:, None] - next_n + 1 + torch.arange(next_n)).int()
    decode = decode_metadata(cache.table[:2], each, next_n)
    prefill = prefill_metadata(cache.table[2:], decode_tokens, prompts, contexts)
    indexer.metadata = metadata(decode, prefill, 2, decode_tokens, 2, tokens)
    buffer = torch.full((tokens + 3, TOPK + 128), -7, dtype=torch.int32)
    call(indexer, cache.pages, q, weights, buffer)
    rows = [(t // next_n, int(each.flatten()[t])) for t in range(decode_tokens)]
    rows += [(2 + b, n - p + 1 + i) for b, (p, n) in enumerate(zip(prompts, contexts)) for i in range(p)]
    for t, (request, length) in enumerate(rows):
        check(buffer[t, :TOPK], cache.scores(q[t], weights[t], request, length))
    assert (buffer[tokens:] == -7).all()
    # vLLM sets the buffer to -1 before it selects. Columns after the selection must stay -1.
    assert (buffer[:tokens, TOPK:] == -1).all()


@pytest.mark.parametrize(
    ("lengths", "lens"),
    [
        # vLLM pads the second sequence to three queries, with NaN. The padding may select anything.
        ([[198, 199, 200], [77, 77, 77]], [3, 1]),
        # All sequences have fewer keys than are selected. Sequences of length 0 pad the batch to the size of a captured
        # graph.
        ([[1], [0], [64]], None),
    ],
)
def test_sequences_of_any_lengths(indexer, lengths, lens):
    counts = lens or [1] * len(lengths)
    rows = [(b, row[i]) for b, row in enumerate(lengths) for i in range(counts[b])]
    cache, padded = Cache(len(lengths), 64), len(lengths) * len(lengths[0])
    q, weights = cache.queries(padded)
    buffer = torch.full((padded, TOPK), -7, dtype=torch.int32)
    decode = decode_metadata(cache.table, int32(lengths), len(lengths[0]), None if lens is None else int32(lens))
    indexer.metadata = metadata(decode, None, len(lengths), len(rows), 0, len(rows))
    call(indexer, cache.pages, q[: len(rows)], weights, buffer)
    for t, (request, length) in enumerate(rows):
        check(buffer[t], cache.scores(q[t], weights[t], request, length))


@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize("next_n", [1, 3])
def test_ranks_that_share_a_sequences_keys(indexer, monkeypatch, next_n, prompts):
    """In decode context parallelism, each rank selects among its own keys. The best of these selections must be the
    best of all keys."""
    ranks, whole, tokens = 2, Cache(2, 64), 2 * next_n
    lengths = torch.tensor([900, 131])
    each = (lengths[:, None] - next_n + 1 + torch.arange(next_n)).int()
    q, weights = whole.queries(tokens)
    candidates = [[] for _ in range(tokens)]

    def merge(logits, indices, k, rank, size, interleave, row_starts=None):
        assert size == ranks and interleave == 1 and row_starts is None
        for row, selected in enumerate(indices):
            own = selected[selected >= 0].long()
            candidates[row] += zip(logits[row, own].tolist(), (own * ranks + rank).tolist())

    monkeypatch.setattr(indexer.module, "_merge_dcp_topk_global", merge)
    for rank in range(ranks):
        pages = torch.zeros_like(whole.pages)
        for request, length in enumerate(lengths.tolist()):
            slots = slots_of(whole.table, request, length)[rank::ranks]
            own = slots_of(whole.table, request, len(slots))
            dsa.write_indexer_cache(whole.k[slots], whole.scale[slots], pages.unsqueeze(2), own)
        local = (each + ranks - 1 - rank) // ranks
        if prompts:
            own = ((lengths + ranks - 1 - rank) // ranks).tolist()
            chunk = prefill_metadata(whole.table, 0, [next_n] * 2, own, local.flatten().tolist())
            indexer.metadata = metadata(None, chunk, 0, 0, 2, tokens)
        else:
            decode = decode_metadata(whole.table, local.int(), next_n, global_lengths=lengths.int())
            indexer.metadata = metadata(decode, None, 2, tokens, 0, tokens)
        buffer = torch.full((tokens, TOPK), -7, dtype=torch.int32)
        call(indexer, pages, q, weights, buffer, dcp_rank=rank, dcp_world_size=ranks)
    for row, found in enumerate(candidates):
        request, length = row // next_n, int(each.flatten()[row])
        chosen = sorted(token for _, token in sorted(found, key=lambda pair: (-pair[0], pair[1]))[:TOPK])
        selected = int32(chosen + [-1] * (TOPK - len(chosen)))
        check(selected, whole.scores(q[row], weights[row], request, length))


def test_the_builders_own_lengths_of_three_queries(plugin, monkeypatch):
    """vLLM's builder returns lengths [B, 3]. It does not make a sequence of each query."""
    plan = module(seams.PLAN)
    builder = object.__new__(plan.DeepseekV32IndexerMetadataBuilder)
    builder.vllm_config = types.SimpleNamespace(speculative_config=None)
    builder.decode_seq_lens_buffer = torch.zeros(64, dtype=torch.int32)
    builder.offsets_buffer = torch.arange(3, dtype=torch.int32)
    monkeypatch.setattr(plan, "current_platform", HopperPlatform)
    monkeypatch.setattr(plan, "has_deep_gemm", lambda: True)
    lengths, three = int32([200, 0, 64]), int32([3, 3, 3])
    each, table, lens, batch, padded = builder._prepare_decode_tensors(
        seq_lens=lengths,
        block_table=torch.zeros(3, 4, dtype=torch.int32),
        decode_lens=three,
        decode_lens_cpu=three,
        query_start_loc=int32([0, 3, 6]),
        num_decodes=3,
        num_decode_tokens=9,
        use_native=plan._supports_native_decode(3),
        next_n=3,
        max_decode_len=3,
    )
    assert each.tolist() == [[198, 199, 200], [0, 0, 0], [62, 63, 64]] and (batch, padded) == (3, False)
    gemm = module(seams.DEEP_GEMM)
    monkeypatch.setattr(gemm, "current_platform", HopperPlatform)
    assert gemm.get_paged_mqa_logits_metadata(each, PAGE, 132).shape == (133, 2)
    assert table.shape == (3, 4) and torch.equal(lens, three)
