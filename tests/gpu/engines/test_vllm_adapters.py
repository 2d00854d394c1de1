"""The adapters for vLLM on the GPU. Their results are compared with the references, and with the kernels that vLLM
itself calls, if these are installed. vLLM is not needed."""

import subprocess
import sys

import pytest
import torch

import dsa
from dsa.cases.attention import PREFILL_TOLERANCES, SPARSE_TOLERANCES
from dsa.compat import deep_gemm
from dsa.testing import assert_close, calc_diff, poison_free_memory
from dsa_bench.peers import deep_gemm as gemm_peers
from dsa_bench.peers import flash_mla as mla_peers
from dsa_bench.peers import topk
from dsa_engines.vllm import adapters, models, warm_up
from tests.engines.vllm.configurations import V4, V32, config
from tests.gpu.engines.batches import (
    DEVICE,
    INT32,
    PAGE,
    Index,
    Step,
    bytes_cache,
    formula,
    int32,
    latent,
    normal,
    v4_cache,
    written,
)
from tests.gpu.op_checks import assert_same_bits, captured

PREFILL, (DECODE, LSE) = PREFILL_TOLERANCES[0], SPARSE_TOLERANCES
MAX_DIFF = 5e-6
HEADS = [8, 16, 32, 64, 128]


# Index scores, plan and gather ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8])
def test_gather_keys(dtype):
    lengths = [1000, 0, 64, 3, 257]
    index, total = Index(lengths), sum(lengths)
    ends = torch.nn.functional.pad(int32(lengths).cumsum(0, dtype=INT32), (1, 0))
    k = torch.full((total + 50, 128), 0xFF, dtype=torch.uint8, device=DEVICE).view(dtype)
    scale = torch.full((total + 50, 4), 0xFF, dtype=torch.uint8, device=DEVICE)
    adapters.gather_keys(index.cache, k, scale, index.table, ends)
    at = [(b, i) for b, n in enumerate(lengths) for i in range(n)]
    b, i = (torch.tensor(x, device=DEVICE) for x in zip(*at))
    slots = index.table[b, i // PAGE].long() * PAGE + i % PAGE
    assert torch.equal(k[:total].view(torch.uint8), index.k[slots].view(torch.uint8))
    assert torch.equal(scale[:total].contiguous().view(torch.float32).squeeze(1), index.scale[slots])
    operator = getattr(torch.ops._C_cache_ops, "cp_gather_indexer_k_quant_cache", None)
    if operator is not None:
        peer_k, peer_scale = torch.zeros_like(k[:total]), torch.zeros_like(scale[:total])
        operator(index.cache.contiguous(), peer_k, peer_scale, index.table, ends)
        assert torch.equal(peer_k.view(torch.uint8), k[:total].view(torch.uint8))
        assert torch.equal(peer_scale, scale[:total])


@pytest.mark.parametrize("heads", [32, 64])
def test_prefill_scores(heads, record_error):
    """Column j of a row of scores belongs to the j-th key of the row's prompt, so max_seqlen_k columns are enough.
    Columns past the last key that the row's token sees are unspecified."""
    tokens, lengths = [130, 77], [1500, 300]
    index, count = Index([1], heads), sum(tokens)
    q, weights = index.queries(count)
    k, scale = dsa.per_token_cast_to_fp8(normal(sum(lengths), 128), use_ue8m0=True)
    firsts, ends = [0, lengths[0]], []
    starts = int32([first for first, n in zip(firsts, tokens) for _ in range(n)])
    for first, n, length in zip(firsts, tokens, lengths):
        ends += range(first + length - n + 1, first + length + 1)
    ends, kv = int32(ends), (k, scale.view(-1))
    poison_free_memory(mebibytes=64)
    logits = deep_gemm.fp8_fp4_mqa_logits((q, None), kv, weights, starts, ends, max(lengths))
    expected = formula(dsa.fp8_mqa_logits, q, kv, weights, starts, ends, clean_logits=True, max_seqlen_k=max(lengths))
    own = torch.arange(max(lengths), device=DEVICE) < (ends - starts)[:, None]
    difference = calc_diff(logits[own], expected[own])
    record_error(difference)
    assert logits.shape == (count, max(lengths)) and difference < MAX_DIFF
    module = gemm_peers.NEW.load()
    if module is not None:
        peer = module.fp8_fp4_mqa_logits((q, None), kv, weights, starts, ends, max(lengths))
        assert calc_diff(logits[own], peer[own]) < MAX_DIFF


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_decode_scores(next_n, heads, record_error):
    """vLLM copies the plan to a buffer with a row for each SM and one more. The plan fills the buffer for any
    next_n."""
    lengths = [4097, 70, 64, 1, 900]
    index = Index(lengths, heads)
    each = (int32(lengths)[:, None] - next_n + 1 + torch.arange(next_n, device=DEVICE)).clamp(min=0).int()
    q, weights = index.queries(len(lengths), next_n)
    sms, columns = dsa.num_sms(DEVICE), 5000
    plan = torch.full((sms + 1, 2), -9, dtype=INT32, device=DEVICE)
    plan[:] = deep_gemm.get_paged_mqa_logits_metadata(each, PAGE, adapters.schedule_slots(sms, next_n), indices=None)
    cache = index.cache.unsqueeze(2)
    logits = deep_gemm.fp8_fp4_paged_mqa_logits((q, None), cache, weights, each, index.table, plan, columns)
    expected = formula(dsa.fp8_paged_mqa_logits, q, cache, weights, each, index.table, None, columns, clean_logits=True)
    own = torch.arange(columns, device=DEVICE) < each.view(-1, 1)
    difference = calc_diff(logits[own], expected[own])
    record_error(difference)
    assert logits.shape == (len(each) * next_n, columns) and difference < MAX_DIFF
    module = gemm_peers.NEW.load()
    if module is not None and next_n in (1, 2, 4):
        theirs = gemm_peers.new_plan(module, each, PAGE, module.get_num_sms())
        pages = cache.contiguous()
        peer = module.fp8_fp4_paged_mqa_logits(
            (q, None), pages, weights, each, index.table.clamp(min=0), theirs, columns
        )
        assert calc_diff(logits[own], peer[own]) < MAX_DIFF


# Top-k ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(3, 70000), (200, 5000), (64, 163840)])
@pytest.mark.parametrize("k", [512, 2048])
def test_topk(rows, columns, k):
    stride = -(-columns // 256) * 256
    logits = normal(rows, stride)[:, :columns]
    lengths = torch.randint(1, columns + 1, (rows,), device=DEVICE).int()
    buffer = torch.full((rows + 2, k + 64), 7, dtype=INT32, device=DEVICE)
    part, zeros = buffer[1:-1, :k], torch.zeros_like(lengths)
    expected = formula(dsa.topk_indices, logits, k, lengths=lengths)
    adapters.topk_prefill(logits, zeros, lengths, part, rows, stride, 1, k)
    prefilled, _ = written(part)
    assert (buffer == 7).all() and torch.equal(prefilled, expected)
    adapters.topk_decode(logits, lengths[:, None], 1, part, k)
    decoded, _ = written(part)
    assert (buffer == 7).all() and torch.equal(decoded, expected)
    # For rows of fewer than k keys, vLLM's kernels write only a part of the result.
    full = lengths >= k
    values = logits[full].gather(1, expected[full].long()).sort(1).values
    for name, calls in topk.select([(logits, lengths, k)]).calls.items():
        if name.startswith("vllm"):
            found = calls[0]().view(rows, k)[full]
            assert torch.equal(logits[full].gather(1, found.long()).sort(1).values, values), name


# Attention ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", HEADS)
def test_fp8_attention(heads, next_n, record_error):
    batch, k, rows, scale = 5, 512, 4096, 576**-0.5
    cache, q = bytes_cache(rows), latent(batch, next_n, heads, 576).bfloat16()
    indices = torch.randint(-200, rows, (batch, next_n, k), device=DEVICE).clamp(min=-1).int()
    indices[1, 0] = -1
    out, lse = adapters.fp8_attention(q, cache.view(torch.float8_e4m3fn), indices, scale)
    expected, expected_lse = formula(adapters.fp8_attention, q.float(), cache, indices, scale)
    record_error(assert_close("out", out, expected, **DECODE))
    assert_close("lse", lse, expected_lse, **LSE)
    assert out.shape == (batch, next_n, heads, 512) and not out[1, 0].any()
    for name, calls in mla_peers.sparse_decode([(q, cache.unsqueeze(2), indices)]).calls.items():
        peer, peer_lse = calls[0]()
        # For a query without keys FlashMLA returns other values than our op, and vLLM masks them.
        has = (indices >= 0).any(-1)
        assert_close(name, peer[:, :, :heads][has], expected[has], **DECODE)
        assert_close(name, peer_lse[:, :heads].mT[has], expected_lse.mT[has], **LSE)


@pytest.mark.parametrize("heads", HEADS)
def test_bf16_attention(heads, record_error):
    """vLLM's buffers for q and out can have more heads than the layer."""
    tokens, k, rows, scale, padded = 70, 512, 3000, 576**-0.5, -(-heads // 64) * 64
    kv, q = latent(rows, 576).bfloat16(), torch.full((tokens, padded, 576), torch.nan, device=DEVICE).bfloat16()
    q[:, :heads] = latent(tokens, heads, 576)
    indices = torch.randint(-200, rows, (tokens, k), device=DEVICE).clamp(min=-1).int()
    counts = torch.randint(0, k + 1, (tokens,), device=DEVICE).int()
    counts[:2] = int32([0, k])
    expected, expected_lse = formula(
        adapters.bf16_attention, q[:, :heads].float(), kv.float(), indices, scale, counts, heads, None
    )
    for buffer in (None, torch.full((tokens, padded, 512), 7.0, device=DEVICE).bfloat16()):
        out, lse = adapters.bf16_attention(q, kv.view(-1, 4, 576), indices, scale, counts, heads, buffer)
        record_error(assert_close("out", out, expected, **PREFILL))
        assert_close("lse", lse, expected_lse, **LSE)
        if buffer is not None:
            assert out.data_ptr() == buffer.data_ptr() and (buffer[:, heads:] == 7).all()
    everything, _ = adapters.bf16_attention(q, kv, indices, scale, None, heads, None)
    given = q[:, :heads].contiguous(), kv.unsqueeze(1), indices.unsqueeze(1), scale
    for name, calls in mla_peers.sparse_prefill([given]).calls.items():
        assert_close(name, calls[0]()[0][:, :heads], everything, **PREFILL)


@pytest.mark.parametrize("entries_page", [None, 64, 2])
@pytest.mark.parametrize("heads", HEADS)
def test_v4_attention(heads, entries_page, record_error):
    """The last query is padding without keys, as in a captured graph."""
    tokens, scale = 9, 512**-0.5
    window, sink = v4_cache(1024, PAGE), normal(heads)
    q = latent(tokens, 1, heads, 512).bfloat16()
    counts = torch.randint(1, 129, (tokens,), device=DEVICE).int()
    counts[-1] = 0
    options = {
        "indices": torch.randint(0, 1024, (tokens, 1, 128), device=DEVICE).int(),
        "topk_length": counts,
        "attn_sink": sink,
    }
    if entries_page:
        more = torch.randint(0, 513, (tokens,), device=DEVICE).int()
        more[-1] = 0
        options |= {
            "extra_k_cache": v4_cache(2048, entries_page),
            "extra_indices_in_kvcache": torch.randint(-9, 2048, (tokens, 1, 512), device=DEVICE).clamp(min=-1).int(),
            "extra_topk_length": more,
        }
    call = {"softmax_scale": scale, "is_fp8_kvcache": True} | options
    buffer = torch.full((tokens + 2, heads, 512), 7.0, device=DEVICE).bfloat16()
    adapters.v4_attention(q, window, None, None, 512, object(), out=buffer[1:-1].unsqueeze(1), **call)
    expected, _ = formula(adapters.v4_attention, q.float(), window, None, None, 512, None, **call)
    record_error(assert_close("out", buffer[1:-1].unsqueeze(1), expected, **DECODE))
    assert (buffer[0] == 7).all() and (buffer[-1] == 7).all() and not buffer[-2].any()
    module = mla_peers.VLLM.load()
    if module is not None and heads % 64 == 0:
        plan, _ = module.get_mla_metadata()
        peer, _ = module.flash_mla_with_kvcache(q, window, None, None, 512, plan, None, **call)
        assert_close(mla_peers.VLLM.name, peer[:-1], expected[:-1], **DECODE)


@pytest.mark.parametrize("heads", HEADS)
def test_v4_prompts(heads, record_error):
    """Unused rows of vLLM's workspace can contain NaN. Indices from a query's count on are outside the workspace, so a
    kernel that read their keys would fail."""
    tokens, k, rows, scale = 40, 640, 2000, 512**-0.5
    kv = torch.full((2, rows, 512), torch.nan, device=DEVICE).bfloat16()
    kv[:, : rows // 2] = latent(2, rows // 2, 512)
    indices = torch.randint(0, rows // 2, (tokens, 1, k), device=DEVICE).int()
    counts = torch.randint(1, k + 1, (tokens,), device=DEVICE).int()
    indices.masked_fill_(torch.arange(k, device=DEVICE) >= counts[:, None, None], 2**30)
    q, sink = latent(tokens, heads, 512).bfloat16(), normal(heads)
    buffer = torch.full((tokens + 2, heads, 512), 7.0, device=DEVICE).bfloat16()
    call = {"sm_scale": scale, "attn_sink": sink, "topk_length": counts}
    adapters.v4_prefill(q=q, kv=kv.view(-1, 1, 512), indices=indices, out=buffer[1:-1], **call)
    expected, *_ = formula(adapters.v4_prefill, q.float(), kv.float().view(-1, 1, 512), indices, **call)
    record_error(assert_close("out", buffer[1:-1], expected, **PREFILL))
    assert (buffer[0] == 7).all() and (buffer[-1] == 7).all()


# Graphs and warm-up ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_a_captured_step_follows_new_lengths(next_n):
    step = Step(next_n)
    step.set([64] * 4)
    graph, results = captured(step.run)
    for lengths in ([3000, 700, 64, 1], [1, 1, 1, 1], [2999, 0, 33, 0], [64, 700, 17, 1]):
        step.set(lengths)
        graph.replay()
        replayed = [x.clone() for x in results]
        assert_same_bits(replayed, step.run())


MODELS = {"v32": V32, "v4": V4}


@pytest.mark.parametrize(
    ("model", "heads", "cache", "speculated"),
    [("v32", 16, "fp8", 2), ("v32", 128, "auto", 0), ("v4", 8, "auto", 1)],
)
def test_nothing_compiles_after_the_warm_up(model, heads, cache, speculated):
    """A new process has not loaded any kernel."""
    code = f"from {__name__} import compile_and_call; compile_and_call({model!r}, {heads}, {cache!r}, {speculated})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def compile_and_call(model, heads, cache, speculated):
    from dsa.runtime import compile_cache

    calls = models.calls_of(config(MODELS[model], heads=heads, cache=cache, speculated=speculated, max_model_len=40960))
    # Below, compiling is an error. The ops that make the inputs here compile kernels. In vLLM these inputs come from
    # vLLM's kernels.
    index, pages, window = Index([200, 70], calls.index_heads), bytes_cache(PAGE), v4_cache(PAGE, PAGE)
    queries = {n: index.queries(2, n) for n in range(1, calls.next_n + 1)}
    warm_up.warm_up(calls, frozenset({"scores", "topk", "attention"}), DEVICE)

    def asked(function, args):
        raise AssertionError(f"{function.__module__}.{function.__name__}{args} was not compiled beforehand")

    compile_cache._load_or_compile = asked
    sms, k = dsa.num_sms(DEVICE), calls.topk
    for next_n, (q, weights) in queries.items():
        each = torch.full((2, next_n), 60, dtype=INT32, device=DEVICE)
        plan = deep_gemm.get_paged_mqa_logits_metadata(each, PAGE, sms, indices=None)
        keys = index.cache.unsqueeze(2)
        deep_gemm.fp8_fp4_paged_mqa_logits((q, None), keys, weights, each, index.table, plan, calls.keys)
    for rows in (1, 2, 7, 16, 17, 33, 40, 66, 67, 100, sms, sms + 1, 300):
        for columns in (100, 5000, 8192, 9000, 16384, 20000, 33000, calls.keys):
            lengths = torch.full((rows,), 50, dtype=INT32, device=DEVICE)
            width = min(columns, calls.keys)
            logits, out = normal(rows, -(-width // 256) * 256)[:, :width], int32([[0] * k]).repeat(rows, 1)
            adapters.topk_decode(logits, lengths[:, None], 1, out, k)
            adapters.topk_prefill(logits, torch.zeros_like(lengths), lengths, out, rows, logits.stride(0), 1, k)
    rows, q = latent(64, 1, calls.query_dim).bfloat16(), latent(2100, calls.heads, calls.query_dim).bfloat16()
    indices = torch.full((2100, 1, 2048), -1, dtype=INT32, device=DEVICE)
    adapters.v4_prefill(q, rows, indices, 1.0)
    for tokens in (1, 2, 3, 5, 8, 13, 31, 64, 100, 132, 200, 257, 500, 900, 1500):
        if calls.query_dim == 512:
            attend_v4(calls, tokens, window)
        else:
            attend(calls, tokens, pages)
    torch.cuda.synchronize()


def attend(calls, tokens, pages):
    q = latent(tokens, calls.heads, 576).bfloat16()
    indices = torch.full((tokens, calls.topk), -1, dtype=INT32, device=DEVICE)
    for s_q in range(1, calls.next_n + 1) if calls.fp8_cache else ():
        if tokens % s_q == 0:
            shape = (tokens // s_q, s_q)
            adapters.fp8_attention(q.unflatten(0, shape), pages, indices.unflatten(0, shape), 1.0)
    counts = torch.zeros(tokens, dtype=INT32, device=DEVICE)
    adapters.bf16_attention(q, latent(64, 576).bfloat16(), indices, 1.0, counts, calls.heads, None)


def attend_v4(calls, tokens, window):
    heads = adapters.v4_heads(calls.heads)
    q, sink = latent(tokens, 1, heads, 512).bfloat16(), normal(heads)
    none, out = torch.zeros(tokens, dtype=INT32, device=DEVICE), torch.empty_like(q)
    for width in (0, calls.topk, -(-calls.compressed // 128) * 128):
        indices = torch.full((tokens, 1, calls.window + width), -1, dtype=INT32, device=DEVICE)
        options = {"indices": indices[..., : calls.window], "topk_length": none, "attn_sink": sink}
        if width:
            options |= {"extra_k_cache": window, "extra_indices_in_kvcache": indices[..., calls.window :]}
            options |= {"extra_topk_length": none}
        adapters.v4_attention(
            q, window, None, None, 512, None, softmax_scale=1.0, is_fp8_kvcache=True, out=out, **options
        )
        rows = latent(PAGE, 1, 512).bfloat16()
        adapters.v4_prefill(q[:, 0], rows, indices, 1.0, attn_sink=sink, topk_length=none, out=out[:, 0])
