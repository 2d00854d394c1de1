"""The adapters, which translate vLLM's calls into calls of dsa's ops, are compared with formulas in float64."""

import inspect
import types

import pytest
import torch

import dsa
from dsa.compat import deep_gemm
from dsa.reference.cache import kv_cache
from dsa.testing import assert_close
from dsa_engines.vllm import adapters, models, seams
from tests.engines.sglang.batches import PAGE, attention, index_scores, int32, latent_cache, selected, slots_of
from tests.engines.vllm.configurations import V32, config

NAN = float("nan")
BYTES = {"abs_tol": 1e-3, "rel_tol": 2.01 / 128, "cos_tol": 5e-6}
NUMBERS = {"abs_tol": 8e-4, "rel_tol": 3.01 / 128, "cos_tol": 7e-6}
LSE = {"abs_tol": 1e-5, "rel_tol": 1e-5}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def counted(indices, counts):
    return torch.where(torch.arange(indices.shape[1]) < counts[:, None], indices, -1)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8])
def test_gather_keys(dtype):
    pages, dim = 9, 128
    k, scale = dsa.per_token_cast_to_fp8(torch.randn(pages * PAGE, dim))
    # The pages are not adjacent: vLLM can store the pages of several layers in one block.
    cache = torch.full((pages, 3, PAGE, dim + 4), 0xFF, dtype=torch.uint8)[:, 1]
    dsa.write_indexer_cache(k, scale.view(-1), cache.unsqueeze(2), torch.arange(pages * PAGE))
    table = torch.randperm(pages).view(3, 3).int()
    lengths = [130, 0, 64]
    ends = int32([0, 130, 130, 194])
    rows = 250
    dst_k, dst_scale = torch.full((rows, dim), 0xFF, dtype=torch.uint8).view(dtype), torch.ones(rows, 4).byte()
    adapters.gather_keys(cache, dst_k, dst_scale, table, ends)
    slots = [int(table[b, i // PAGE]) * PAGE + i % PAGE for b, n in enumerate(lengths) for i in range(n)]
    assert torch.equal(dst_k[:194].view(torch.uint8), k[slots].view(torch.uint8))
    assert torch.equal(dst_scale[:194].contiguous().view(torch.float32), scale[slots])
    assert not dst_k[194:].view(torch.uint8).any() and not dst_scale[194:].any()


def in_order(row):
    """Sort a row as `selected` does: ascending, then every -1."""
    return sorted(row.tolist(), key=lambda i: (i < 0, i))


def test_topk_prefill_writes_its_part_of_a_wider_buffer():
    rows, columns, k = 7, 300, 32
    logits = torch.randint(0, 9, (rows, columns)).float()
    starts, ends = int32([0, 5, 100, 290, 3, 40, 299]), int32([300, 30, 100, 300, 299, 39, 300])
    buffer = torch.full((rows + 4, k + 16), -7, dtype=torch.int32)
    part = buffer[2 : 2 + rows, :k]
    adapters.topk_prefill(logits, starts, ends, part, rows, logits.stride(0), 1, k)
    for row, (a, b) in enumerate(zip(starts.tolist(), ends.tolist())):
        assert in_order(part[row]) == selected(logits[row, a:b], k)
    part.fill_(-7)
    assert (buffer == -7).all()


@pytest.mark.parametrize("shape", ["a query", "a sequence", "a sequence's only"])
@pytest.mark.parametrize("next_n", [1, 3])
def test_topk_decode(next_n, shape):
    batch, columns, k = 3, 200, 24
    logits = torch.randint(0, 5, (batch * next_n, columns)).float()
    lengths = torch.tensor([200, 9, 2])
    each = (lengths[:, None] - next_n + 1 + torch.arange(next_n)).clamp(min=0)
    given = {"a query": each, "a sequence": lengths[:, None], "a sequence's only": lengths}[shape].int()
    buffer = torch.full((batch * next_n, k + 8), -7, dtype=torch.int32)
    adapters.topk_decode(logits, given, next_n, buffer[:, :k], k)
    for row, n in enumerate(each.flatten().tolist()):
        assert in_order(buffer[row, :k]) == selected(logits[row, :n], k)
    assert (buffer[:, k:] == -7).all()


def test_a_topk_kernel_that_the_user_chose_stays():
    calls = []
    forward = adapters.topk_forward(lambda self, *rest: calls.append(rest))
    logits, lengths, out = torch.rand(2, 8), int32([[8], [3]]), torch.zeros(2, 4, dtype=torch.int32)
    forward(types.SimpleNamespace(_backend="persistent"), logits, lengths, 1, out, 4, 8)
    assert len(calls) == 1 and calls[0][0] is logits and not out.any()
    forward(types.SimpleNamespace(_backend="auto"), logits, lengths, 1, out, 4, 8)
    assert len(calls) == 1 and out.any()


@pytest.mark.parametrize("heads", [8, 24, 128])
def test_fp8_attention_takes_heads_as_they_are(heads):
    cache, keys = latent_cache(656, 4)
    q = torch.randn(2, 3, heads, 576, dtype=torch.bfloat16)
    indices = torch.randint(-40, 4 * PAGE, (2, 3, 32)).clamp(min=-1).int()
    indices[1, 2] = -1
    expected, _, expected_lse = attention(q.flatten(0, 1), keys, indices.flatten(0, 1), 0.05)
    for bytes_as in (torch.uint8, torch.float8_e4m3fn):
        out, lse = adapters.fp8_attention(q, cache.squeeze(2).view(bytes_as), indices, 0.05)
        assert out.shape == (2, 3, heads, 512) and lse.shape == (2, heads, 3)
        assert_close("out", out.flatten(0, 1), expected, **BYTES)
        assert_close("lse", lse.mT.flatten(0, 1), expected_lse, **LSE)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("heads", [8, 64])
def test_bf16_attention_leaves_padded_heads_alone(heads, given):
    keys, scale, padded = torch.randn(300, 576).bfloat16(), 0.05, 64
    q = torch.full((5, padded, 576), NAN, dtype=torch.bfloat16)
    q[:, :heads] = torch.randn(5, heads, 576)
    indices = torch.randint(-40, 300, (5, 40)).clamp(min=-1).int()
    counts = int32([40, 0, 1, 17, 40])
    buffer = torch.full((5, padded, 512), -7.0, dtype=torch.bfloat16) if given else None
    out, lse = adapters.bf16_attention(q, keys.view(100, 3, 576), indices, scale, counts, heads, buffer)
    if given:
        assert out.data_ptr() == buffer.data_ptr() and (buffer[:, heads:] == -7).all()
    expected, _, expected_lse = attention(q[:, :heads], keys, counted(indices, counts), scale)
    assert_close("out", out, expected, **NUMBERS)
    assert_close("lse", lse, expected_lse, **LSE)
    everything, _ = adapters.bf16_attention(q, keys, indices, scale, None, heads, None)
    expected, *_ = attention(q[:, :heads], keys, indices, scale)
    assert_close("out", everything, expected, **NUMBERS)


def v4_cache(pages, page):
    """Return (cache [pages, page, 1, 584] with the strides of the engine's cache, its keys)."""
    cache, slots = kv_cache.make_v4_cache(pages, page, "cpu"), torch.arange(pages * page)
    dsa.write_kv_cache(torch.randn(pages * page, 512), cache, slots)
    return cache, dsa.read_kv_cache(cache, slots)


@pytest.mark.parametrize("entries_page", [None, 64, 2])
@pytest.mark.parametrize("heads", [8, 64])
def test_v4_attention(heads, entries_page):
    """Compressed entries have 4 tokens (64 per page) or 128 tokens (2 per page)."""
    tokens, scale = 4, 512**-0.5
    (window, keys), sink = v4_cache(3, PAGE), torch.randn(heads)
    q = torch.randn(tokens, 1, heads, 512, dtype=torch.bfloat16)
    indices, counts = torch.randint(0, 3 * PAGE, (tokens, 1, 128)).int(), int32([128, 0, 5, 64])
    options, more = {}, None
    if entries_page:
        entries, entry_keys = v4_cache(96 // entries_page + 1, entries_page)
        chosen, chosen_counts = torch.randint(-5, 96, (tokens, 1, 64)).clamp(min=-1).int(), int32([64, 0, 64, 1])
        options = {
            "extra_k_cache": entries,
            "extra_indices_in_kvcache": chosen,
            "extra_topk_length": chosen_counts,
        }
        more = entry_keys, counted(chosen.squeeze(1), chosen_counts)
    out, plan = torch.full((tokens, heads, 512), NAN, dtype=torch.bfloat16), types.SimpleNamespace(config=None)
    # vLLM passes arguments by name, and a plan object that the adapter must not change.
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
    expected, *_ = attention(q.squeeze(1), keys, counted(indices.squeeze(1), counts), scale, sink, more)
    assert_close("out", out, expected, **BYTES)


def test_v4_heads():
    assert [adapters.v4_heads(n) for n in (1, 8, 9, 16, 20, 32, 40, 64, 65, 128)] == [
        *(8, 8, 16, 16, 32, 32, 64, 64, 128, 128)
    ]
    with pytest.raises(ValueError, match=r"^num_heads: a GPU can have at most 128, got 129$"):
        adapters.v4_heads(129)


@pytest.mark.parametrize("next_n", [1, 3, 4])
def test_a_plan_for_every_multiprocessor_scores_every_key(next_n):
    """The plan has one row more than the GPU has SMs, like vLLM's buffer."""
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
        slots = slots_of(table, row // next_n, n)
        expected = index_scores(q.flatten(0, 1)[row : row + 1], k[slots], scale.view(-1)[slots], weights[row : row + 1])
        assert torch.allclose(logits[row, :n].double(), expected[0], rtol=1e-4, atol=1e-3)


def test_more_queries_of_a_sequence_are_left_to_the_engine():
    assert [n for n in range(10) if adapters.native_next_n_supported(n)] == [1, 2, 3, 4]


CALLS = models.calls_of(config(V32))
MAKERS = [(path, new) for makers in seams.REPLACED.values() for path, new in makers.items() if path in seams.SIGNATURES]


@pytest.mark.parametrize(("path", "make"), MAKERS)
def test_replacements_take_what_the_engine_gives(path, make):
    """A replacement has vLLM's parameter names in vLLM's order. The last ones may be **options."""
    new, pinned = make(lambda: None, CALLS), seams.SIGNATURES[path]
    function, first = (new.__func__, 1) if isinstance(new, classmethod) else (new, 0)
    parameters = inspect.signature(function, follow_wrapped=False).parameters
    options = [name for name, p in parameters.items() if p.kind is p.VAR_KEYWORD]
    names = [name for name in parameters if name not in options][first:]
    assert pinned[: len(names)] == names
    assert options or len(pinned) == len(names)


def test_index_scores_take_what_the_engine_gives():
    """vLLM passes `indices` by name, and all other arguments by position."""
    inspect.signature(deep_gemm.fp8_fp4_mqa_logits).bind(*range(6))
    inspect.signature(deep_gemm.fp8_fp4_paged_mqa_logits).bind(*range(7), indices=None)
    inspect.signature(deep_gemm.get_paged_mqa_logits_metadata).bind(*range(3), indices=None)
