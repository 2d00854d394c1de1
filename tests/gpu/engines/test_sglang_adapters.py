"""The adapters for SGLang on the GPU. Their results are compared with formulas in float64, with the references, and
with the kernels that SGLang itself calls, if these are installed. SGLang is not needed."""

import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import dsa
from dsa.cases.attention import PREFILL_TOLERANCES, SPARSE_TOLERANCES
from dsa.testing import assert_close, calc_diff, poison_free_memory
from dsa_bench.peers import deep_gemm as gemm_peers
from dsa_bench.peers import flash_mla as mla_peers
from dsa_bench.peers import operators
from dsa_engines.sglang import adapters, hooks
from dsa_engines.sglang.layouts import Model
from dsa_engines.sglang.warm_up import v4_widths, warm_up
from tests.engines.sglang import batches
from tests.engines.sglang.batches import BF16, E4M3, INT32, PAGE
from tests.gpu.op_checks import captured

DEVICE = "cuda"
PREFILL, DECODE = PREFILL_TOLERANCES[0], SPARSE_TOLERANCES[0]
# Tolerance between our result and FlashMLA's. It is wider than DECODE: both have an error, and FlashMLA rounds softmax
# weights to bf16.
BESIDE = {"abs_tol": 4e-3, "rel_tol": 4.02 / 128, "cos_tol": 2e-5}
LSE = {"abs_tol": 1e-5, "rel_tol": 8.01 / 65536}
MAX_DIFF = 5e-6  # limit of calc_diff of index scores
RECALL = 0.98  # SGLang's top-k is not exact
HEADS = [8, 16, 32, 64, 128]


def int32(values):
    return batches.int32(values, DEVICE)


def normal(*shape):
    return torch.randn(*shape, device=DEVICE)


def latent(*shape):
    return (normal(*shape) / 10).clamp(-1, 1).to(BF16)


def peer(library):
    module = library.load()
    return module if module is not None else pytest.skip(f"{library.name} is not installed")


def operator(name):
    peer(operators.SGLANG)
    found = getattr(torch.ops.sgl_kernel, name, None)
    return found if found is not None else pytest.skip(f"SGLang's library has no {name}")


def formula(function, *args, **options):
    with dsa.use_backend("reference"):
        return function(*args, **options)


# Index scores and their plan ------------------------------------------------------------------------------------------


def index_cache(lengths):
    """Return (cache, block table) for index keys in shuffled pages. The cache is uint8 [pages, PAGE, 1, 132]. A page
    contains PAGE keys of 128 bytes, then their fp32 scales."""
    table, pages = batches.paged(lengths, DEVICE)
    k, k_scale = batches.index_keys(pages * PAGE, DEVICE)
    cache = torch.cat([k.view(torch.uint8).view(pages, -1), k_scale.view(pages, PAGE).view(torch.uint8)], 1)
    return cache.view(pages, PAGE, 1, 132), table


def seen(scores, ends, starts=None):
    """Return the scores with -inf outside each row's range [start, end). The op leaves these columns unspecified."""
    column = torch.arange(scores.shape[1], device=DEVICE)
    outside = column >= ends[:, None]
    return scores.masked_fill(outside if starts is None else outside | (column < starts[:, None]), -math.inf)


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("columns", [0, 8192])
def test_prefill_scores(heads, columns, record_error):
    """With columns = 0 each query sees a random range, and the result has a column per key. Otherwise the ranges begin
    at key 0 and the result has `columns` columns, as for DeepSeek-V4."""
    queries, keys = 700, 8192 if columns else 5000
    k, k_scale = batches.index_keys(keys, DEVICE)
    q, weights = normal(queries, heads, 128).to(E4M3), normal(queries, heads)
    ends = torch.randint(1, keys + 1, (queries,), device=DEVICE).to(INT32)
    starts = torch.zeros_like(ends) if columns else (ends.double() * torch.rand(queries, device=DEVICE)).to(INT32)
    poison_free_memory(mebibytes=256)
    got = adapters.fp8_mqa_logits(q, (k, k_scale), weights, starts, ends, False, columns)
    want = formula(dsa.fp8_mqa_logits, q, (k, k_scale), weights, starts, ends, True, columns)
    if columns:
        assert not got.isnan().any()
    error = calc_diff(seen(got, ends, starts), want)
    record_error(error)
    assert error < MAX_DIFF
    theirs = peer(gemm_peers.OLD).fp8_mqa_logits(
        q, (k, k_scale), weights, starts, ends, clean_logits=False, max_seqlen_k=columns
    )
    assert calc_diff(seen(got, ends, starts), seen(theirs[:, : got.shape[1]], ends, starts)) < MAX_DIFF


LENGTHS = [0, 1, 63, 64, 300, 5000, 8191]


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_decode_scores(heads, next_n, record_error):
    lengths = [max(n, next_n) if n else 0 for n in LENGTHS]
    cache, table = index_cache(lengths)
    q, weights = normal(len(lengths), next_n, heads, 128).to(E4M3), normal(len(lengths) * next_n, heads)
    visible = int32([[max(n - next_n + 1 + i, 0) for i in range(next_n)] for n in lengths])
    columns, sms = table.shape[1] * PAGE, dsa.num_sms(DEVICE)
    plan = adapters.get_paged_mqa_logits_metadata(visible, PAGE, sms)
    given = q, cache, weights, visible, table
    got = seen(adapters.fp8_paged_mqa_logits(*given, plan, columns), visible.flatten())
    want = seen(formula(dsa.fp8_paged_mqa_logits, *given, None, columns), visible.flatten())
    error = calc_diff(got, want)
    record_error(error)
    assert error < MAX_DIFF
    if next_n > 2 or heads < 32:
        return  # DeepGEMM supports at most two queries per sequence, and at least 32 heads
    module = peer(gemm_peers.OLD)
    q, weights, visible, table = q[1:], weights[next_n:], visible[1:].contiguous(), table[1:]
    plan = module.get_paged_mqa_logits_metadata(visible, PAGE, sms)
    assert torch.equal(plan, adapters.get_paged_mqa_logits_metadata(visible, PAGE, sms))
    logits = module.fp8_paged_mqa_logits(q, cache, weights, visible, table, plan, columns, clean_logits=False)
    assert calc_diff(got[next_n:], seen(logits[:, :columns], visible.flatten())) < MAX_DIFF


def test_scores_of_a_captured_graph_follow_the_lengths():
    """SGLang makes a plan for every batch and copies it into the tensor that the graph reads."""
    cache, table = index_cache([4096] * 8)
    q, weights = normal(8, 1, 64, 128).to(E4M3), normal(8, 64)
    lengths = torch.full((8, 1), 5, dtype=INT32, device=DEVICE)
    plan = adapters.get_paged_mqa_logits_metadata(lengths, PAGE, dsa.num_sms(DEVICE))

    def step():
        logits = adapters.fp8_paged_mqa_logits(q, cache, weights, lengths, table, plan, 4096)
        return logits, adapters.topk_paged(logits, lengths[:, 0], 2048, table, PAGE)

    graph, (logits, slots) = captured(step)
    for new in ([4096] * 8, [0, 1, 64, 65, 2047, 2048, 2049, 4000], [5] * 8):
        lengths.copy_(int32(new)[:, None])
        plan.copy_(adapters.get_paged_mqa_logits_metadata(lengths, PAGE, dsa.num_sms(DEVICE)))
        graph.replay()
        eager = step()
        assert torch.equal(seen(logits, lengths[:, 0]), seen(eager[0], lengths[:, 0]))
        assert torch.equal(slots, eager[1])
        want = formula(dsa.topk_indices, logits, 2048, lengths=lengths[:, 0], block_table=table, page_size=PAGE)
        assert torch.equal(slots, want)


# Selection ------------------------------------------------------------------------------------------------------------


def shared(got, theirs):
    """Return the fraction of our selected keys that `theirs` also selects, in the worst row. Negative numbers are no
    keys."""
    shares = []
    for ours, other in zip(got.tolist(), theirs.tolist()):
        ours, other = {n for n in ours if n >= 0}, {n for n in other if n >= 0}
        assert len(ours) == len(other)
        shares.append(len(ours & other) / len(ours) if ours else 1.0)
    return min(shares)


def test_selection_of_decoding():
    lengths = [0, 1, 2047, 2048, 2049, 20_000, 33_333]
    table, _ = batches.paged(lengths, DEVICE)
    logits, ends = normal(len(lengths), table.shape[1] * PAGE), int32(lengths)
    got = adapters.topk_paged(logits, ends, 2048, table, PAGE)
    want = formula(dsa.topk_indices, logits, 2048, lengths=ends, block_table=table, page_size=PAGE)
    assert torch.equal(got, want)
    position = torch.arange(logits.shape[1], device=DEVICE)
    wide = (table[:, position // PAGE] * PAGE + position % PAGE).int()
    theirs = torch.empty_like(got)
    cu_seqlens = torch.arange(len(lengths) + 1, dtype=INT32, device=DEVICE)
    operator("fast_topk_transform_fused")(logits, ends, theirs, wide, cu_seqlens, None)
    assert shared(got, theirs) >= RECALL


@pytest.mark.parametrize("k", [16, 2048])
def test_selection_of_prefill(k):
    """SGLang's kernel exists only for k = 2048."""
    scale = 1 if k == 16 else 100
    prefixes, sizes = [0, 30 * scale, 0, 5 * scale], [9, 30 * scale + 40, 0, 5 * scale + 7]
    logits, lengths, starts, metadata, expected = batches.prefill_metadata(prefixes, sizes, DEVICE)
    logits.add_(torch.rand_like(logits) * 0.9 if k == 2048 else 0)
    positions = int32(expected(k))
    assert torch.equal(adapters.topk(logits, lengths, k, starts), positions)
    columns = torch.where(positions < 0, -1, positions + starts[:, None])
    got = adapters.topk_ragged(logits, lengths, k, starts, starts)
    assert torch.equal(got, columns)
    table, owners = metadata.real_page_table, metadata.token_to_batch_idx
    slots = table[owners.long()[:, None], positions.clamp(min=0).long() // PAGE] * PAGE + positions % PAGE
    paged = adapters.topk_paged(logits, lengths, k, table, PAGE, starts, owners)
    assert torch.equal(paged, torch.where(positions < 0, -1, slots))
    if k == 2048:
        theirs = torch.empty_like(got)
        operator("fast_topk_transform_ragged_fused")(logits, lengths, theirs, starts, starts)
        assert shared(got, theirs) >= RECALL


def test_columns_of_a_long_prompt():
    """The adapter's block table has a row per column of the scores. The rows overlap in memory; without overlap the
    table would have more than 2^31 numbers."""
    logits, starts = normal(300, 70_000), int32([50_000] * 300)
    lengths = torch.arange(1, 301, dtype=INT32, device=DEVICE) * 60
    got = adapters.topk_ragged(logits, lengths, 2048, starts, starts)
    positions = formula(dsa.topk_indices, logits, 2048, starts=starts, lengths=lengths)
    assert torch.equal(got, torch.where(positions < 0, -1, positions + 50_000))


@pytest.mark.parametrize("k", [512, 1024])
@pytest.mark.parametrize("with_positions", [False, True])
def test_selection_of_v4(k, with_positions):
    lengths = [0, 1, k - 1, k, k + 1, 20_000]
    table, _ = batches.paged(lengths, DEVICE)
    logits, ends = normal(len(lengths), table.shape[1] * PAGE), int32(lengths)
    buffers = torch.full((2, len(lengths), k + 64), 7, dtype=INT32, device=DEVICE)
    slots, positions = buffers[:, :, 32 : 32 + k]
    adapters.topk_into(logits, ends, table, slots, PAGE, positions if with_positions else None)
    want = formula(dsa.topk_indices, logits, k, lengths=ends, block_table=table, page_size=PAGE)
    assert torch.equal(slots, want)
    if with_positions:
        assert torch.equal(positions, formula(dsa.topk_indices, logits, k, lengths=ends))
    assert (buffers[:, :, :32] == 7).all() and (buffers[:, :, 32 + k :] == 7).all()


# Attention ------------------------------------------------------------------------------------------------------------


def padded(q, dim):
    """SGLang pads the heads (dimension `dim`) to a multiple of 64 for FlashMLA."""
    return torch.nn.functional.pad(q, (0, 0, 0, -q.shape[dim] % 64))


@pytest.mark.parametrize("dim", [576, 512])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("with_sink", [False, True])
def test_prefill_attention(heads, dim, with_sink, record_error):
    """max_logits and lse are in base 2, as SGLang's FlashMLA returns them."""
    tokens, keys, k = 40, 3000, 512
    q, kv = latent(tokens, heads, dim), latent(keys, 1, dim)
    indices = torch.randint(0, keys, (tokens, 1, k), device=DEVICE).to(INT32)
    lengths = torch.randint(1, k + 1, (tokens,), device=DEVICE).to(INT32)
    sink = normal(heads) if with_sink else None
    given = q, kv, indices, 0.3, 512, sink, lengths
    out, top, lse = adapters.sparse_prefill(*given)
    used = indices[:, 0].masked_fill(torch.arange(k, device=DEVICE) >= lengths[:, None], -1)
    want = batches.attention(q, kv[:, 0], used, 0.3, sink)
    record_error(assert_close("out", out, want[0], **PREFILL))
    assert_close("max_logits", top * math.log(2), want[1], **LSE)
    assert_close("lse", lse * math.log(2), want[2], **LSE)
    whole = None if sink is None else torch.nn.functional.pad(sink, (0, -heads % 64))
    theirs = peer(mla_peers.SGL).flash_mla_sparse_fwd(
        padded(q, 1), kv, indices, 0.3, 512, whole, lengths, use_legacy=True, return_log2_lse=True
    )
    assert_close("their out", out, theirs[0][:, :heads], **PREFILL)
    assert_close("their max_logits", top, theirs[1][:, :heads], **LSE)
    assert_close("their lse", lse, theirs[2][:, :heads], **LSE)


@pytest.mark.parametrize("tokens", [1, 3, 130])
@pytest.mark.parametrize("heads", HEADS)
def test_decode_attention(heads, tokens, record_error):
    cache, rows = batches.latent_cache(656, 70, DEVICE)
    q, indices = latent(tokens, 1, heads, 576), torch.randint(0, 70 * PAGE, (tokens, 1, 2048), device=DEVICE).to(INT32)
    indices[0, :, 100:] = -1
    lengths = int32([100, *[2048] * (tokens - 1)])
    want = batches.attention(q[:, 0], rows, indices[:, 0], 0.3)
    outs = [
        adapters.sparse_decode(q, cache, indices, 512, 0.3, counts, batch_invariant=invariant)
        for counts in (None, lengths)
        for invariant in (False, True)
    ]
    for out, lse in outs:
        record_error(assert_close("out", out[:, 0], want[0], **DECODE))
        assert_close("lse", lse[:, :, 0], want[2], **LSE)
    # All queries but the first use all 2048 indices. Batch-invariant decoding gives them the same bits with counts and
    # without.
    assert torch.equal(outs[1][0][1:], outs[3][0][1:])
    module = peer(mla_peers.SGL)
    plan, _ = module.get_mla_metadata()
    options = {"softmax_scale": 0.3, "is_fp8_kvcache": True, "indices": indices, "use_legacy": True}
    theirs, _ = module.flash_mla_with_kvcache(padded(q, 2), cache, None, None, 512, plan, None, **options)
    assert_close("their out", outs[0][0], theirs[:, :, :heads], **BESIDE)


@pytest.mark.parametrize("heads", [8, 128])
def test_decode_attention_over_a_bf16_cache(heads):
    cache, rows = batches.latent_cache(576, 70, DEVICE)
    q, indices = latent(5, 1, heads, 576), torch.randint(0, 70 * PAGE, (5, 1, 2048), device=DEVICE).to(INT32)
    out, _ = adapters.sparse_decode(q, cache, indices, 512, 0.3)
    assert_close("out", out[:, 0], batches.attention(q[:, 0], rows, indices[:, 0], 0.3)[0], **DECODE)


@pytest.mark.parametrize("tokens", [1, 3, 130])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("with_entries", [False, True])
def test_v4_attention(heads, tokens, with_entries, record_error):
    """Call the hook that SGLang's backend calls, with an object in place of the plan of SGLang's FlashMLA."""
    (window, rows), (entries, more) = (batches.latent_cache(584, pages, DEVICE) for pages in (20, 30))
    q, sink = latent(tokens, 1, heads, 512), normal(heads)
    indices, selected = (
        torch.randint(0, pages * PAGE, (tokens, 1, k), device=DEVICE).to(INT32) for pages, k in ((20, 128), (30, 512))
    )
    counts = [torch.randint(1, k + 1, (tokens,), device=DEVICE).to(INT32) for k in (128, 512)]
    given = {"is_fp8_kvcache": True, "indices": indices, "topk_length": counts[0], "softmax_scale": 0.3}
    if with_entries:
        extra = {"extra_k_cache": entries, "extra_indices_in_kvcache": selected, "extra_topk_length": counts[1]}
        given |= extra
    out, _ = hooks.flash_mla_with_kvcache(lambda: False)(
        None, q, window, None, None, 512, SimpleNamespace(config=None), attn_sink=sink, **given
    )
    used = [
        index[:, 0].masked_fill(torch.arange(index.shape[2], device=DEVICE) >= count[:, None], -1)
        for index, count in zip((indices, selected), counts)
    ]
    want, *_ = batches.attention(q[:, 0], rows, used[0], 0.3, sink, (more, used[1]) if with_entries else None)
    record_error(assert_close("out", out[:, 0], want, **DECODE))
    module = peer(mla_peers.SGL)
    plan, _ = module.get_mla_metadata()
    whole = torch.nn.functional.pad(sink, (0, -heads % 64))
    theirs, _ = module.flash_mla_with_kvcache(
        padded(q, 2), window, None, None, 512, plan, None, attn_sink=whole, use_legacy=True, **given
    )
    assert_close("their out", out, theirs[:, :, :heads], **BESIDE)


def test_attention_of_a_captured_graph_follows_indices_and_lengths():
    """Before each replay, new placeholders for FlashMLA's plan (`no_plan`) replace the captured ones, as in SGLang."""
    cache, rows = batches.latent_cache(656, 70, DEVICE)
    q, indices = latent(8, 1, 16, 576), torch.full((8, 1, 2048), -1, dtype=INT32, device=DEVICE)
    lengths = torch.zeros(8, dtype=INT32, device=DEVICE)
    plan = adapters.no_plan(lengths)
    graph, (out, _) = captured(adapters.sparse_decode, q, cache, indices, 512, 0.3, lengths)
    for new in ([2048] * 8, [0, 1, 64, 65, 100, 1000, 2047, 2048], [0] * 8):
        lengths.copy_(int32(new))
        indices.copy_(torch.randint(0, 70 * PAGE, indices.shape, device=DEVICE))
        for kept, made in zip(plan, adapters.no_plan(lengths)):
            kept.copy_(made)
        graph.replay()
        used = indices[:, 0].masked_fill(torch.arange(2048, device=DEVICE) >= lengths[:, None], -1)
        assert_close("out", out[:, 0], batches.attention(q[:, 0], rows, used, 0.3)[0], **DECODE)


# Warming up -----------------------------------------------------------------------------------------------------------

MODELS = {
    "v32": Model(heads=16, query_dim=576, topk=2048, index_heads=64, keys=40_960, next_n=2, fp8_cache=True),
    "glm": Model(heads=64, query_dim=576, topk=2048, index_heads=32, keys=40_960, next_n=4, fp8_cache=False),
    "v4": Model(heads=8, query_dim=512, topk=512, index_heads=64, keys=40_960, next_n=1, fp8_cache=True),
}


@pytest.mark.parametrize("model", MODELS)
def test_nothing_compiles_after_warming_up(model):
    """A new process has not loaded any kernel."""
    code = f"from {__name__} import warm_up_and_call; warm_up_and_call({model!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def warm_up_and_call(name):
    from dsa.runtime import compile_cache

    model = MODELS[name]
    # Below, compiling is an error. The ops that make the inputs here compile kernels. In SGLang these inputs come from
    # SGLang's kernels.
    index, (cache, _) = index_cache([200, 70]), batches.latent_cache(cache_width(model), 2, DEVICE)
    k, k_scale = batches.index_keys(70, DEVICE)
    rows = latent(90, 1, model.query_dim)
    warm_up(model, frozenset({"scores", "topk", "attention"}), DEVICE)

    def asked(function, args):
        raise AssertionError(f"{function.__module__}.{function.__name__}{args} was not compiled beforehand")

    compile_cache._load_or_compile = asked
    columns = 128 if model.query_dim == 512 else 0
    q, ends = normal(9, max(model.index_heads, 32), 128).to(E4M3), int32([70] * 9)
    adapters.fp8_mqa_logits(q, (k, k_scale), normal(*q.shape[:2]), ends * 0, ends, False, columns)
    for next_n in {1, model.next_n}:
        lengths, q = int32([[60] * next_n] * 2), normal(2, next_n, model.index_heads, 128).to(E4M3)
        plan = adapters.get_paged_mqa_logits_metadata(lengths, PAGE, dsa.num_sms(DEVICE))
        weights = normal(2 * next_n, model.index_heads)
        adapters.fp8_paged_mqa_logits(q, index[0], weights, lengths, index[1], plan, index[1].shape[1] * PAGE)
    sms = dsa.num_sms(DEVICE)
    for count in (1, 2, 7, 16, 17, 33, 40, 66, 67, 100, sms, sms + 1, 300):
        for width in (100, 5000, 8192, 9000, 16_384, 20_000, 33_000, model.keys):
            lengths = torch.full((count,), 50, dtype=INT32, device=DEVICE)
            logits = normal(count, -(-width // 256) * 256)[:, :width]
            adapters.topk(logits, lengths, model.topk)
            adapters.topk_ragged(logits, lengths, model.topk, lengths * 0, lengths * 0)
    q, indices = latent(5, model.heads, model.query_dim), torch.zeros(5, 1, 512, dtype=INT32, device=DEVICE)
    sink = normal(model.heads) if model.query_dim == 512 else None
    adapters.sparse_prefill(q, rows, indices, 1.0, attn_sink=sink)
    q, indices = latent(2100, model.heads, model.query_dim), torch.zeros(2100, 1, 2048, dtype=INT32, device=DEVICE)
    adapters.sparse_prefill(q, rows, indices, 1.0, attn_sink=sink)
    for tokens in (1, 2, 3, 5, 8, 11, 13, 31, 64, 100, 132, 200, 257, 500, 900):
        q = latent(tokens, 1, model.heads, model.query_dim)
        for width in (128, *(128 + n for n in v4_widths(model))) if model.query_dim == 512 else (model.topk,):
            indices = torch.zeros(tokens, 1, width, dtype=INT32, device=DEVICE)
            extra = (cache, indices[:, :, 128:].contiguous()) if width > 128 and model.query_dim == 512 else ()
            first = indices[:, :, :128].contiguous() if extra else indices
            adapters.sparse_decode(q, cache, first, 512, 1.0, None, sink, *extra)
    torch.cuda.synchronize()


def cache_width(model):
    return 584 if model.query_dim == 512 else 656 if model.fp8_cache else 576
