"""vLLM's attention of DeepSeek-V4 with the plugin: windows, alone or with compressed entries of 4 or 128 tokens each.
The number of heads is not padded to 64."""

import types

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import dsa
from dsa.reference.cache import kv_cache
from dsa.testing import assert_close
from dsa_engines.vllm import seams
from tests.engines.vllm import engine
from tests.engines.vllm.engine import PAGE, int32, needs_vllm, slots_of

pytestmark = needs_vllm
WINDOW, TOPK, SCALE = 128, 64, 512**-0.5
TOLERANCE = {"abs_tol": 1e-3, "rel_tol": 3.01 / 128, "cos_tol": 7e-6}


class Keys:
    """Keys in pages with 584 bytes per key. `rows` are the keys as they are read back."""

    def __init__(self, pages, page, requests):
        self.page = page
        self.pages, slots = kv_cache.make_v4_cache(pages, page, "cpu"), torch.arange(pages * page)
        dsa.write_kv_cache(torch.randn(pages * page, 512), self.pages, slots)
        self.rows = dsa.read_kv_cache(self.pages, slots).double()
        self.table = torch.randperm(pages)[: requests * (pages // requests)].view(requests, -1).int()

    def slots(self, request, positions):
        length = int(positions.max()) + 1 if len(positions) else 0
        return slots_of(self.table, request, length, self.page)[positions]

    def of(self, request, positions):
        return self.rows[self.slots(request, positions)]


@pytest.fixture
def v4(plugin, monkeypatch):
    torch.manual_seed(0)
    module = __import__(seams.V4, fromlist=["_"])
    monkeypatch.setattr(module, "current_workspace_manager", engine.workspaces)
    return module


def layer(module, ratio, heads, keys, selected):
    cls = module.DeepseekV4FlashMLAAttention
    one = cls.__new__(cls)
    object.__setattr__(one, "__dict__", {"_parameters": {}, "_buffers": {}, "_modules": {}, "training": False})
    padded = cls.get_padded_num_q_heads(heads)
    sink = torch.full((padded,), -torch.inf)
    sink[:heads] = torch.randn(heads)
    one.__dict__.update(
        compress_ratio=ratio,
        scale=SCALE,
        attn_sink=sink,
        padded_heads=padded,
        window_size=WINDOW,
        max_image_tokens=0,
        max_num_batched_tokens=64,
        topk_indices_buffer=selected,
        swa_cache_layer=types.SimpleNamespace(kv_cache=keys.pages.squeeze(2)),
    )
    return one


def attend(q, rows, sink):
    logits = SCALE * q.double() @ rows.T
    out = logits.softmax(-1) @ rows
    return out * torch.sigmoid(logits.logsumexp(-1) - sink.double())[:, None]


@pytest.mark.parametrize("ratio", [1, 4, 128])
@pytest.mark.parametrize("heads", [12, 64])
def test_decoding(v4, monkeypatch, ratio, heads):
    """Three tokens of two sequences, and a token of padding, which has no keys."""
    lengths = [700, 130, 700]
    windows, entries = Keys(24, PAGE, 2), Keys(24, PAGE if ratio == 4 else 2, 2)
    requests = [0, 1, 0]
    seen = [torch.arange(max(0, n - WINDOW), n) for n in lengths]
    chosen = [torch.randperm(n // ratio if ratio > 1 else 0)[:TOPK] for n in lengths]
    selected = pad_sequence([torch.zeros(TOPK), *chosen], batch_first=True, padding_value=-1)[1:].int()
    one = layer(v4, ratio, heads, windows, selected)
    q = torch.randn(4, one.padded_heads, 512).bfloat16()
    swa, chosen_slots = (torch.full((4, 1, width), -1, dtype=torch.int32) for width in (WINDOW, TOPK))
    for t, request in enumerate(requests):
        swa[t, 0, : len(seen[t])] = windows.slots(request, seen[t])
        chosen_slots[t, 0, : len(chosen[t])] = entries.slots(request, chosen[t])
    lens = int32([*((row >= 0).sum() for row in selected), 0])
    given = (chosen_slots[:, 0], lens)
    monkeypatch.setattr(v4, "compute_global_topk_indices_and_lens", lambda *_: given)
    plan = types.SimpleNamespace(have_initialized=False)
    metadata = types.SimpleNamespace(
        num_decodes=2,
        num_decode_tokens=4,
        is_valid_token=torch.tensor([True, True, True, False]),
        token_to_req_indices=int32([*requests, 0]),
        decode_swa_indices=swa,
        decode_swa_lens=int32([*map(len, seen), 0]),
        tile_sched_swaonly=plan,
        tile_sched_c4a=plan,
        tile_sched_c128a=plan,
    )
    compressed = types.SimpleNamespace(
        block_size=256,
        block_table=entries.table,
        c128a_global_decode_topk_indices=chosen_slots,
        c128a_decode_topk_lens=lens,
    )
    out = torch.full((4, one.padded_heads, 512), float("nan")).bfloat16()
    one._forward_decode(
        q=q,
        kv_cache=entries.pages.squeeze(2) if ratio > 1 else None,
        swa_metadata=metadata,
        attn_metadata=compressed if ratio > 1 else None,
        swa_only=ratio == 1,
        output=out,
    )
    for t, request in enumerate(requests):
        rows = torch.cat([windows.of(request, seen[t]), entries.of(request, chosen[t])])
        assert_close("out", out[t, :heads], attend(q[t, :heads], rows, one.attn_sink[:heads]), **TOLERANCE)
    assert not out[3].any() and not plan.have_initialized


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("heads", [8, 64])
def test_prompts(v4, monkeypatch, ratio, heads):
    """vLLM gathers the compressed entries and the window's keys into one bf16 array. The queries attend to it."""
    tokens, length = 9, 300
    windows, entries = Keys(12, PAGE, 1), Keys(6, PAGE, 1)
    count = length // ratio if ratio > 1 else 0
    selected = torch.stack([torch.randperm(max(count, TOPK))[:TOPK] for _ in range(tokens)]).int()
    one = layer(v4, ratio, heads, windows, selected)
    q = torch.randn(tokens, one.padded_heads, 512).bfloat16()
    first = length - tokens - WINDOW + 1

    def gather(out, cache, seq_lens, gather_lens, block_table, block_size, offset):
        source = windows if gather_lens is not None else entries
        positions = torch.arange(first, length) if gather_lens is not None else torch.arange(int(seq_lens[0]))
        out[0, offset : offset + len(positions)] = source.of(0, positions).bfloat16()

    def combine(chosen, starts, seq_lens, gather_lens, window, compress, top_k, m, n, out, **_):
        indices, lens = out
        indices.fill_(2**30)  # indices after the first `lens[t]` must not be read
        for t in range(tokens):
            oldest = length - tokens + t - WINDOW + 1 - first
            own = [*chosen[t, :top_k].tolist(), *range(n + oldest, n + oldest + WINDOW)]
            indices[t, : len(own)], lens[t] = int32(own), len(own)
        return indices, lens

    monkeypatch.setattr(v4, "dequantize_and_gather_k_cache", gather)
    monkeypatch.setattr(v4, "combine_topk_swa_indices", combine)
    metadata = types.SimpleNamespace(
        num_prefill_tokens=tokens,
        num_decodes=0,
        num_decode_tokens=0,
        prefill_seq_lens=int32([length]),
        prefill_gather_lens=int32([length - first]),
        query_start_loc_cpu=int32([0, tokens]),
        query_start_loc=int32([0, tokens]),
        block_table=windows.table,
        block_size=PAGE,
        prefill_left_visible=None,
        prefill_right_visible=None,
        get_prefill_chunk_plan=lambda compress_ratio, prefill_chunk_size: [(0, 1, count, count + length - first)],
    )
    out = torch.full_like(q, float("nan"))
    one._forward_prefill(
        q=q,
        positions=torch.arange(length - tokens, length),
        compressed_k_cache=entries.pages.squeeze(2) if ratio > 1 else None,
        swa_k_cache=windows.pages.squeeze(2),
        output=out,
        attn_metadata=types.SimpleNamespace(block_size=256, block_table=entries.table) if ratio > 1 else None,
        swa_metadata=metadata,
    )
    for t in range(tokens):
        last = length - tokens + t
        rows = windows.of(0, torch.arange(last - WINDOW + 1, last + 1))
        if ratio > 1:
            rows = torch.cat([rows, entries.of(0, selected[t].long())])
        rows = rows.bfloat16().double()
        assert_close("out", out[t, :heads], attend(q[t, :heads], rows, one.attn_sink[:heads]), **TOLERANCE)


def test_heads_of_a_share_are_not_padded_to_64(v4):
    """vLLM builds V4's layers from this class and from subclasses, such as DSpark's."""
    assert v4.DeepseekV4FlashMLAAttention.get_padded_num_q_heads(8) == 8

    class Derived(v4.DeepseekV4FlashMLAAttention):
        pass

    assert Derived.get_padded_num_q_heads(12) == 16
