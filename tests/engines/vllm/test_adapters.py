"""vLLM's calls on the ops of dsa, without vLLM, against the formulas in float64."""

import inspect
import types

import pytest
import torch

import dsa
from dsa.compat import deep_gemm
from dsa.reference.cache import kv_cache
from dsa.testing import assert_close
from dsa_engines.vllm import adapters, seams

PAGE = 64
NAN = float("nan")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def int32(values):
    return torch.as_tensor(values, dtype=torch.int32)


def attended(q, keys, selected, scale, sink=None):
    """(out [H, 512], lse [H]) of q [H, d] over keys [n, d] in float64: selected are rows of keys, -1 is none."""
    rows = keys[selected[selected >= 0].long()].double()
    if not len(rows):
        return torch.zeros(len(q), 512, dtype=torch.float64), torch.full((len(q),), torch.inf, dtype=torch.float64)
    logits = scale * q.double() @ rows.T
    lse = logits.logsumexp(-1)
    out = logits.softmax(-1) @ rows[:, :512]
    if sink is not None:
        out = out * torch.sigmoid(lse - sink.double())[:, None]
    return out, lse


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8])
def test_gather_keys(dtype):
    pages, dim = 9, 128
    k, scale = dsa.per_token_cast_to_fp8(torch.randn(pages * PAGE, dim))
    # Pages that lie apart, as those of several layers in one block do.
    cache = torch.full((pages, 3, PAGE, dim + 4), 0xFF, dtype=torch.uint8)[:, 1]
    dsa.write_indexer_cache(k, scale.view(-1), cache.unsqueeze(2), torch.arange(pages * PAGE))
    table = torch.randperm(pages).view(3, 3).int()
    lengths = [130, 0, 64]
    ends = int32([0, 130, 130, 194])
    rows = 250  # more than there are
    dst_k, dst_scale = torch.full((rows, dim), 0xFF, dtype=torch.uint8).view(dtype), torch.ones(rows, 4).byte()
    adapters.gather_keys(cache, dst_k, dst_scale, table, ends)
    slots = [int(table[b, i // PAGE]) * PAGE + i % PAGE for b, n in enumerate(lengths) for i in range(n)]
    assert torch.equal(dst_k[:194].view(torch.uint8), k[slots].view(torch.uint8))
    assert torch.equal(dst_scale[:194].contiguous().view(torch.float32), scale[slots])
    assert not dst_k[194:].view(torch.uint8).any() and not dst_scale[194:].any()


def best(row, k):
    """The k largest of a row, the lowest index of equal ones, ascending; -1 behind them."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
    return sorted(order) + [-1] * (k - len(order))


def test_topk_prefill_writes_its_part_of_a_wider_buffer():
    rows, columns, k = 7, 300, 32
    logits = torch.randint(0, 9, (rows, columns)).float()  # many are equal
    starts, ends = int32([0, 5, 100, 290, 3, 40, 299]), int32([300, 30, 100, 300, 299, 39, 300])
    buffer = torch.full((rows + 4, k + 16), -7, dtype=torch.int32)
    part = buffer[2 : 2 + rows, :k]
    adapters.topk_prefill(logits, starts, ends, part, rows, logits.stride(0), 1, k)
    for row, (a, b) in enumerate(zip(starts.tolist(), ends.tolist())):
        assert sorted(part[row].tolist(), key=lambda i: (i < 0, i)) == best(logits[row, a:b].tolist(), k)
    part.fill_(-7)
    assert (buffer == -7).all()


@pytest.mark.parametrize("shape", ["a query", "a sequence", "a sequence's only"])
@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_topk_decode(next_n, shape):
    batch, columns, k = 3, 200, 24
    logits = torch.randint(0, 5, (batch * next_n, columns)).float()
    lengths = torch.tensor([200, 9, 2])
    each = (lengths[:, None] - next_n + 1 + torch.arange(next_n)).clamp(min=0)
    given = {"a query": each, "a sequence": lengths[:, None], "a sequence's only": lengths}[shape].int()
    buffer = torch.full((batch * next_n, k + 8), -7, dtype=torch.int32)
    adapters.topk_decode(logits, given, next_n, buffer[:, :k], k)
    for row, n in enumerate(each.flatten().tolist()):
        found = sorted(buffer[row, :k].tolist(), key=lambda i: (i < 0, i))
        assert found == best(logits[row, :n].tolist(), k)
    assert (buffer[:, k:] == -7).all()


def test_a_topk_kernel_that_the_user_chose_stays():
    calls = []
    forward = adapters.topk_forward(lambda self, *rest: calls.append(rest))
    logits, lengths, out = torch.rand(2, 8), int32([[8], [3]]), torch.zeros(2, 4, dtype=torch.int32)
    forward(types.SimpleNamespace(_backend="persistent"), logits, lengths, 1, out, 4, 8)
    assert len(calls) == 1 and calls[0][0] is logits and not out.any()
    forward(types.SimpleNamespace(_backend="auto"), logits, lengths, 1, out, 4, 8)
    assert len(calls) == 1 and out.any()


@pytest.mark.parametrize("heads", [8, 16, 24, 128])
def test_fp8_attention_takes_heads_as_they_are(heads):
    keys, scale = torch.randn(4 * PAGE, 576), 0.05
    cache = torch.zeros(4, PAGE, 656, dtype=torch.uint8)
    dsa.write_kv_cache(keys, cache.unsqueeze(2), torch.arange(4 * PAGE))
    keys = dsa.read_kv_cache(cache.unsqueeze(2), torch.arange(4 * PAGE))
    q = torch.randn(2, 3, heads, 576, dtype=torch.bfloat16)
    indices = torch.randint(-40, 4 * PAGE, (2, 3, 32)).clamp(min=-1).int()
    indices[1, 2] = -1
    for bytes_as in (torch.uint8, torch.float8_e4m3fn):
        out, lse = adapters.fp8_attention(q, cache.view(bytes_as), indices, scale)
        assert out.shape == (2, 3, heads, 512) and lse.shape == (2, heads, 3)
        for b in range(2):
            for s in range(3):
                expected, expected_lse = attended(q[b, s], keys, indices[b, s], scale)
                assert_close("out", out[b, s], expected, abs_tol=1e-3, rel_tol=2.01 / 128, cos_tol=5e-6)
                assert torch.allclose(lse[b, :, s].double(), expected_lse, atol=1e-5)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("heads", [8, 16, 64])
def test_bf16_attention_leaves_padded_heads_alone(heads, given):
    keys, scale, padded = torch.randn(300, 576).bfloat16(), 0.05, 64
    q = torch.full((5, padded, 576), NAN, dtype=torch.bfloat16)
    q[:, :heads] = torch.randn(5, heads, 576)
    indices = torch.randint(-40, 300, (5, 40)).clamp(min=-1).int()
    counts = int32([40, 0, 1, 17, 40])
    buffer = torch.full((5, padded, 512), -7.0, dtype=torch.bfloat16) if given else None
    out, lse = adapters.bf16_attention(q, keys.view(100, 3, 576), indices, scale, counts, heads, buffer)
    assert out.shape == (5, heads, 512) and lse.shape == (5, heads)
    if given:
        assert out.data_ptr() == buffer.data_ptr() and (buffer[:, heads:] == -7).all()
    for t, count in enumerate(counts.tolist()):
        expected, expected_lse = attended(q[t, :heads], keys, indices[t, :count], scale)
        assert_close("out", out[t], expected, abs_tol=8e-4, rel_tol=3.01 / 128, cos_tol=7e-6)
        assert torch.allclose(lse[t].double(), expected_lse, atol=1e-5)
    everything, _ = adapters.bf16_attention(q, keys, indices, scale, None, heads, None)
    expected, _ = attended(q[1, :heads], keys, indices[1], scale)
    assert_close("out", everything[1], expected, abs_tol=8e-4, rel_tol=3.01 / 128, cos_tol=7e-6)


def v4_cache(pages, page):
    """(cache [pages, page, 1, 584] at the engine's distances, its keys as they are read back)."""
    cache, slots = kv_cache.make_v4_cache(pages, page, "cpu"), torch.arange(pages * page)
    dsa.write_kv_cache(torch.randn(pages * page, 512), cache, slots)
    return cache, dsa.read_kv_cache(cache, slots)


@pytest.mark.parametrize("entries_page", [None, 64, 2])
@pytest.mark.parametrize("heads", [8, 64])
def test_v4_attention(heads, entries_page):
    """Windows alone, and with entries of 4 or of 128 tokens, whose pages have 64 or 2."""
    tokens, scale = 4, 512**-0.5
    (window, window_keys), sink = v4_cache(3, PAGE), torch.randn(heads)
    q = torch.randn(tokens, 1, heads, 512, dtype=torch.bfloat16)
    indices, counts = torch.randint(0, 3 * PAGE, (tokens, 1, 128)).int(), int32([128, 0, 5, 64])
    options, entry_keys = {}, torch.zeros(0, 512)
    if entries_page:
        entries, entry_keys = v4_cache(96 // entries_page + 1, entries_page)
        more = torch.randint(-5, 96, (tokens, 1, 64)).clamp(min=-1).int()
        options = {
            "extra_k_cache": entries,
            "extra_indices_in_kvcache": more,
            "extra_topk_length": int32([64, 0, 64, 1]),
        }
    out, plan = torch.full((tokens, heads, 512), NAN, dtype=torch.bfloat16), types.SimpleNamespace(config=None)
    # As the engine calls it, with names, and with a plan of its own.
    adapters.v4_attention(
        q=q,
        k_cache=window,
        block_table=None,
        head_dim_v=512,
        tile_scheduler_metadata=plan,
        cache_seqlens=None,
        is_fp8_kvcache=True,
        indices=indices,
        topk_length=counts,
        softmax_scale=scale,
        attn_sink=sink,
        out=out.unsqueeze(1),
        **options,
    )
    assert vars(plan) == {"config": None}
    for t, count in enumerate(counts.tolist()):
        selected, keys = [indices[t, 0, :count]], torch.cat([window_keys, entry_keys])
        if entries_page:
            chosen = more[t, 0, : options["extra_topk_length"][t]]
            selected.append(torch.where(chosen < 0, -1, chosen + len(window_keys)))
        expected, _ = attended(q[t, 0], keys, torch.cat(selected), scale, sink)
        assert_close("out", out[t], expected, abs_tol=1e-3, rel_tol=2.01 / 128, cos_tol=5e-6)


def test_v4_heads():
    assert [adapters.v4_heads(n) for n in (1, 8, 9, 16, 20, 32, 40, 64, 65, 128)] == [
        *(8, 8, 16, 16, 32, 32, 64, 64, 128, 128)
    ]
    with pytest.raises(ValueError, match=r"^num_heads: a GPU can have at most 128, got 129$"):
        adapters.v4_heads(129)


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_a_plan_for_every_multiprocessor_scores_every_key(next_n):
    """The plan as the engine asks for it, into a buffer of one row a multiprocessor and one more."""
    assert adapters.native_next_n_supported(next_n)
    heads, dim, pages, columns = 32, 128, 12, 384
    k, scale = dsa.per_token_cast_to_fp8(torch.randn(pages * PAGE, dim), use_ue8m0=True)
    cache = torch.zeros(pages, PAGE, 1, dim + 4, dtype=torch.uint8)
    dsa.write_indexer_cache(k, scale.view(-1), cache, torch.arange(pages * PAGE))
    table, lengths = torch.randperm(pages).view(2, 6).int(), torch.tensor([384, 70])
    q = torch.randn(2, next_n, heads, dim).to(torch.float8_e4m3fn)
    weights = torch.randn(2 * next_n, heads)
    lengths = (lengths[:, None] - next_n + 1 + torch.arange(next_n)).int()
    plan = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE, adapters.schedule_slots(132, next_n), indices=None)
    assert plan.shape == (133, 2)
    logits = deep_gemm.fp8_fp4_paged_mqa_logits((q, None), cache, weights, lengths, table, plan, columns)
    for row, n in enumerate(lengths.flatten().tolist()):
        b = row // next_n
        slots = [int(table[b, i // PAGE]) * PAGE + i % PAGE for i in range(n)]
        keys = k[slots].double() * scale[slots].double()
        expected = (weights[row].double()[:, None] * (q.flatten(0, 1)[row].double() @ keys.T).relu()).sum(0)
        assert torch.allclose(logits[row, :n].double(), expected, rtol=1e-4, atol=1e-3)


def test_more_queries_of_a_sequence_are_left_to_the_engine():
    assert [n for n in range(10) if adapters.native_next_n_supported(n)] == [1, 2, 3, 4]


FUNCTIONS = {path: new for ops in seams.REPLACED.values() for path, new in ops.items() if path in seams.SIGNATURES}


@pytest.mark.parametrize("path", FUNCTIONS)
def test_replacements_take_what_the_engine_gives(path):
    """By the engine's names and in its order."""
    new, pinned = FUNCTIONS[path](lambda: None), seams.SIGNATURES[path]
    function, first = (new.__func__, 1) if isinstance(new, classmethod) else (new, 0)
    parameters = inspect.signature(function, follow_wrapped=False).parameters
    options = [name for name, p in parameters.items() if p.kind is p.VAR_KEYWORD]
    names = [name for name in parameters if name not in options][first:]
    assert pinned[: len(names)] == names
    assert options or len(pinned) == len(names)


def test_index_scores_take_what_the_engine_gives():
    """vLLM calls DeepGEMM's functions by position, and gives `indices` by name."""
    inspect.signature(deep_gemm.fp8_fp4_mqa_logits).bind(*range(6))
    inspect.signature(deep_gemm.fp8_fp4_paged_mqa_logits).bind(*range(7), indices=None)
    inspect.signature(deep_gemm.get_paged_mqa_logits_metadata).bind(*range(3), indices=None)
