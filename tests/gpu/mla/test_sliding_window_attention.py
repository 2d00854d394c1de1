"""Attention to windows on the GPU: packed keys, also with selected ones, against the fp32 reference and float64."""

import math

import pytest
import torch

import dsa
from dsa.reference.cache import kv_cache
from dsa.reference.mla import sliding_window_attention as reference
from dsa.reference.mla import sliding_window_decode as window_decode
from dsa.testing import assert_close, poison_free_memory, poisoned

D_V = 512
PREFILL = {"abs_tol": 8e-4, "rel_tol": 3.01 / 128, "cos_tol": 7e-6}
PREFILL_LSE = {"abs_tol": 1e-6, "rel_tol": 2.01 / 65536}
DECODE = {"abs_tol": 1e-3, "rel_tol": 2.01 / 128, "cos_tol": 5e-6}
DECODE_LSE = {"abs_tol": 1e-6, "rel_tol": 8.01 / 65536}
INF, NAN = math.inf, math.nan
BF16, FP16 = torch.bfloat16, torch.float16
KINDS = [(576, BF16), (576, FP16), (512, BF16), (512, FP16)]
# Queries and keys of sequences: empty, whole, chunks, without queries, without keys, with less keys than queries.
SEQUENCES = [(0, 0), (1, 1), (50, 50), (0, 30), (17, 300), (3, 0), (130, 130), (5, 2), (1, 900)]
SINKS = [-INF, INF, 0.0, 5.0, 6.0, 7.0, -1e30, 1e30]


def int32(values):
    return torch.as_tensor(values, dtype=torch.int32, device="cuda")


def normal(*shape, dtype=BF16):
    return (torch.randn(shape, device="cuda") / 10).clamp(-1, 1).to(dtype)


def packed(sequences=SEQUENCES, heads=16, d=512, dtype=BF16):
    """q, kv, cu_seqlens_q, cu_seqlens_k; the last two queries and keys belong to no sequence."""
    ends = torch.tensor([(0, 0), *sequences]).cumsum(0)
    queries, keys = (ends[-1] + 2).tolist()
    return normal(queries, heads, d, dtype=dtype), normal(keys, 1, d, dtype=dtype), *map(int32, ends.T.contiguous())


def select(queries, n, k, invalid=0.1):
    """Every query's own rows of n, in any order, that share of them no rows."""
    bad = int32([-1, n, -(2**31), 2**31 - 1, n + 1, -2])[torch.randint(6, (queries, k), device="cuda")]
    rows = torch.randint(0, max(n, 1), (queries, k), dtype=torch.int32, device="cuda")
    return torch.where(torch.rand(queries, k, device="cuda") < invalid, bad, rows)


def attended(q, keys, mask, sink=None):
    """fp64: every query's softmax over the keys where mask [T, N]."""
    logits = torch.einsum("thd,nd->thn", q.double(), keys.double()) * q.shape[2] ** -0.5
    logits = logits.masked_fill(~mask[:, None], -INF)
    lse = logits.logsumexp(2)
    empty = lse == -INF
    weights = (logits - lse.masked_fill(empty, 0.0)[..., None]).exp()
    if sink is not None:
        weights *= torch.sigmoid(lse - sink.double()).masked_fill(empty, 0.0)[..., None]
    return torch.einsum("thn,nd->thd", weights, keys[:, :D_V].double()), lse.masked_fill(empty, INF)


def window_mask(sequences, window, queries, keys):
    """[queries, keys]: which keys are in which window, by the definition."""
    mask = torch.zeros(queries, keys, dtype=torch.bool)
    t = first = 0
    for n_q, n_k in sequences:
        for p in range(n_k - n_q, n_k):
            mask[t, first + max(0, p - window + 1) : first + max(0, p + 1)] = True
            t += 1
        first += n_k
    return mask.cuda()


def run(arguments, window, selected=None, **options):
    """The window alone, or with (compressed, indices)."""
    scale = arguments[0].shape[2] ** -0.5
    if selected is None:
        return dsa.sliding_window_attention(*arguments, window, scale, **options)
    return dsa.window_sparse_attention(*arguments, window, *selected, scale, **options)


def expected_of(arguments, window, selected=None, **options):
    q, *rest = arguments
    if selected is None:
        return reference.sliding_window_attention(q.float(), *rest, window, q.shape[2] ** -0.5, **options)
    return reference.window_sparse_attention(q.float(), *rest, window, *selected, q.shape[2] ** -0.5, **options)


def check(arguments, window, selected=None, record_error=None, got=None, expected=None, **options):
    poison_free_memory(mebibytes=64)
    out, lse = run(arguments, window, selected, **options) if got is None else got
    expected, expected_lse = expected_of(arguments, window, selected, **options) if expected is None else expected
    assert out.dtype == arguments[0].dtype and lse.dtype == torch.float32
    assert out.is_contiguous() and lse.is_contiguous()
    error = assert_close("out", out, expected, **PREFILL)
    assert_close("lse", lse, expected_lse, **PREFILL_LSE)
    if record_error:
        record_error(error)
    return out, lse


def assert_same(got, expected):
    for x, y in zip(got, expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(("d", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("heads", [1, 8, 16, 32, 64, 80, 128])
def test_heads(heads, d, dtype, record_error):
    arguments, sink = packed(heads=heads, d=d, dtype=dtype), torch.randn(heads, device="cuda")
    check(arguments, 128, None, record_error, attn_sink=sink)
    selected = normal(700, 1, d, dtype=dtype), select(len(arguments[0]), 700, 100)
    check(arguments, 128, selected, record_error, attn_sink=sink)


@pytest.mark.parametrize("d", [576, 512])
@pytest.mark.parametrize("heads", [8, 128])
@pytest.mark.parametrize("window", [1, 7, 63, 64, 65, 128, 1000, 10**9])
def test_windows(window, heads, d, record_error):
    arguments = packed(heads=heads, d=d)
    q, kv, *_ = arguments
    mask = window_mask(SEQUENCES, window, len(q), len(kv))
    out, lse = check(arguments, window, None, record_error, expected=attended(q, kv[:, 0], mask))
    empty = ~mask.any(1)
    assert 7 < int(empty.sum()) < 20 and out[empty].eq(0).all() and lse[empty].eq(INF).all()


@pytest.mark.parametrize(("n", "k"), [(1, 1), (50, 7), (900, 64), (5000, 512), (900, 1024)])
@pytest.mark.parametrize("d", [576, 512])
@pytest.mark.parametrize("window", [1, 100, 128])
def test_window_and_selected(window, d, n, k, record_error):
    """Against float64 over both kinds of keys; no row is selected twice."""
    arguments = packed(SEQUENCES[:6], 16, d)
    q, kv, *_ = arguments
    compressed = normal(n, 1, d)
    indices = torch.rand(len(q), max(n, k), device="cuda").argsort(1)[:, :k].int()
    indices[3], indices[4, : k // 2] = -1, 2**31 - 1
    lengths, sink = int32([k, 0, -1, 2**31 - 1, k // 2, 1]).repeat(20)[: len(q)], torch.randn(16, device="cuda")
    keys, near = torch.cat((kv, compressed))[:, 0], window_mask(SEQUENCES[:6], window, len(q), len(kv))
    for counts in (None, lengths):
        counted = indices if counts is None else indices.where(torch.arange(k, device="cuda") < counts[:, None], -1)
        far = torch.zeros(len(q), n + 1, dtype=torch.bool, device="cuda")
        far.scatter_(1, torch.where((counted >= 0) & (counted < n), counted, n).long(), True)
        expected = attended(q, keys, torch.cat((near, far[:, :n]), 1), sink)
        options = {"topk_length": counts, "attn_sink": sink}
        check(arguments, window, (compressed, indices), record_error, expected=expected, **options)


@pytest.mark.parametrize(("heads", "d"), [(64, 512), (128, 512), (128, 576), (16, 512)])
def test_two_branches_merged(heads, d):
    """One softmax over both is the merge of one over each, with the sink once."""
    arguments = packed(heads=heads, d=d)
    q = arguments[0]
    compressed, indices = normal(2000, 1, d), select(len(q), 2000, 512)
    sink = torch.randn(heads, device="cuda")
    near = run(arguments, 128)
    far, _, far_lse = dsa.flash_mla_sparse_fwd(q, compressed, indices[:, None], d**-0.5)
    merged, merged_lse = dsa.merge_attention([near[0], far], [near[1], far_lse], sink)
    out, lse = run(arguments, 128, (compressed, indices), attn_sink=sink)
    assert_close("out", out, merged, abs_tol=8e-4, rel_tol=3.01 / 128, cos_tol=1e-5)  # each branch is rounded
    assert_close("lse", lse, merged_lse, abs_tol=2e-6, rel_tol=4.02 / 65536)


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("length", [131, 133, 3000])
def test_a_chunk(length, heads, record_error):
    """About as many queries as multiprocessors, and more; V4's numbers."""
    arguments = packed([(length, length + 5000)], heads)
    selected = normal(1250, 1, 512), select(len(arguments[0]), 1250, 512)
    check(arguments, 128, None, record_error)
    check(arguments, 128, selected, record_error, attn_sink=torch.randn(heads, device="cuda"))


def test_sinks(record_error):
    arguments, sink = packed(heads=8), torch.tensor(SINKS, device="cuda")
    for selected in (None, (normal(300, 1, 512), select(len(arguments[0]), 300, 50))):
        out, lse = check(arguments, 100, selected, record_error, attn_sink=sink)
        plain, plain_lse = run(arguments, 100, selected)
        assert torch.equal(lse, plain_lse) and torch.equal(out[:, 0], plain[:, 0])
        assert not out[:, [1, 7]].any() and out[10:20, 3].any()


@pytest.mark.parametrize("selected", [False, True])
def test_a_list_made_before_gives_the_same_bits(selected):
    arguments = packed()
    total = len(arguments[0])
    more = (normal(300, 1, 512), select(total, 300, 50)) if selected else None
    for window in (7, 128, 3000):
        near = dsa.window_indices(*arguments[2:], total, window)
        name = "window_indices" if selected else "indices"
        assert_same(run(arguments, window, more, **{name: near}), run(arguments, window, more))


def test_it_is_sparse_attention_to_that_list():
    arguments = packed(heads=64)
    near = dsa.window_indices(*arguments[2:], len(arguments[0]), 128)
    out, _, lse = dsa.flash_mla_sparse_fwd(*arguments[:2], near[:, None], 512**-0.5)
    got = run(arguments, 128)
    assert_close("out", got[0], out, **PREFILL)
    assert_close("lse", got[1], lse, **PREFILL_LSE)


@pytest.mark.parametrize("heads", [16, 128])
def test_keys_that_nobody_attends_to(heads):
    """NaN outside of the windows and of the selection changes no bit."""
    sequences = [(40, 700), (3, 3), (9, 400)]
    arguments = q, kv, *_ = packed(sequences, heads)
    compressed, indices = normal(500, 1, 512), select(len(q), 500, 90) // 2 * 2
    alone, joined = check(arguments, 50), check(arguments, 50, (compressed, indices))
    unseen = ~window_mask(sequences, 50, len(q), len(kv)).any(0)
    assert unseen.sum() > 600
    for bad in (NAN, INF, -INF):
        kv[unseen], compressed[1::2] = bad, bad
        assert_same(run(arguments, 50), alone)
        assert_same(run(arguments, 50, (compressed, indices)), joined)


def test_nan_reaches_the_queries_that_see_it():
    sequences = [(40, 700), (30, 60)]
    arguments = q, kv, *_ = packed(sequences)
    clean = run(arguments, 8)
    kv[700 + 40, 0, 7] = NAN
    out, lse = run(arguments, 8)
    hit = window_mask(sequences, 8, len(q), len(kv))[:, 740]
    assert int(hit.sum()) == 8 and out[hit].isnan().all() and lse[hit].isnan().all()
    assert_same((out[~hit], lse[~hit]), (clean[0][~hit], clean[1][~hit]))


@pytest.mark.parametrize("selected", [False, True])
def test_sequences_do_not_depend_on_each_other(selected):
    """Alone: the same bits."""
    arguments = q, kv, cu_q, cu_k = packed(heads=128)
    more = (normal(300, 1, 512), select(len(q), 300, 50)) if selected else None
    out, lse = run(arguments, 100, more)
    for b in range(len(SEQUENCES)):
        (q0, q1), (k0, k1) = cu_q[b : b + 2].tolist(), cu_k[b : b + 2].tolist()
        own = (more[0], more[1][q0:q1]) if selected else None
        got = run((q[q0:q1], kv[k0:k1], int32([0, q1 - q0]), int32([0, k1 - k0])), 100, own)
        assert_same(got, (out[q0:q1], lse[q0:q1]))


@pytest.mark.parametrize("seed", range(10))
def test_anything_in_cu_seqlens(seed):
    """A query attends to some keys of kv or to none: its result is between them, whatever lies around kv."""
    torch.manual_seed(seed)
    memory = torch.full((900, 1, 512), NAN, dtype=BF16, device="cuda")
    kv = memory[300:600]
    kv.copy_(normal(300, 1, 512))
    garbage = int32([-(2**31), 2**31 - 1, -1, 0, 1, 50, 200, 299, 300, 301, 1000, 2**30])
    cu_q, cu_k = (garbage[torch.randint(len(garbage), (9,), device="cuda")] for _ in range(2))
    arguments = normal(200, 16, 512), kv, cu_q, cu_k
    for selected in (None, (kv, select(200, 300, 30))):
        out, lse = run(arguments, 128, selected)
        assert out.isfinite().all() and out.abs().max() <= 1.01 * kv.abs().max() and not lse.isnan().any()


def test_nothing_to_do():
    q, kv, cu_q, cu_k = packed()
    none, selected = int32([0] * len(cu_q)), (normal(30, 1, 512), select(len(q), 30, 9, 0.0))
    nothing = (selected[0][:0], selected[1]), (selected[0], selected[1][:, :0])
    for arguments in ((q, kv[:0], cu_q, none), (q, kv, none, cu_k), (q, kv, int32([0]), int32([0]))):
        for more in (None, *nothing):
            out, lse = check(arguments, 128, more)
            assert out.eq(0).all() and lse.eq(INF).all()
        check(arguments, 128, selected)
    for more in nothing:
        assert_same(check((q, kv, cu_q, cu_k), 128, more), run((q, kv, cu_q, cu_k), 128))
    for queries in (q[:0], q[:, :0]):
        more = selected[0], selected[1][: len(queries)]
        arguments = queries, kv, cu_q if len(queries) else none, cu_k
        for out, lse in (run(arguments, 128), run(arguments, 128, more)):
            assert out.shape == (*queries.shape[:2], D_V) and lse.shape == queries.shape[:2]


@pytest.mark.parametrize("d", [576, 512])
def test_strides(d):
    """All as parts of larger tensors, which hold NaN and other numbers beside them."""
    q, kv, cu_q, cu_k = packed(heads=32, d=d)
    compressed, indices = normal(300, 1, d), select(len(q), 300, 50)
    options = {"attn_sink": torch.randn(32, device="cuda"), "topk_length": int32([40]).repeat(len(q))}
    expected = run((q, kv, cu_q, cu_k), 100, (compressed, indices), **options)
    wide = [torch.nn.functional.pad(x, (8, 56), value=NAN)[..., 8 : 8 + d] for x in (q, kv, compressed)]
    apart = [torch.stack((x, -x), 1)[:, 0] for x in (cu_q, cu_k)]
    others = torch.nn.functional.pad(indices, (1, 2), value=5)[:, 1:51]
    two = {name: torch.stack((x, x + 1), 1)[:, 0] for name, x in options.items()}
    assert_same(run((wide[0], wide[1], *apart), 100, (wide[2], others), **two), expected)
    near = dsa.window_indices(cu_q, cu_k, len(q), 100).repeat_interleave(2, 1)[:, ::2]
    turned = q.transpose(0, 1).contiguous().transpose(0, 1)
    got = run((turned, kv, cu_q, cu_k), 100, (compressed, indices), window_indices=near, **options)
    assert_same(got, expected)


def test_keys_beyond_2_to_the_31_numbers():
    """The last keys of 4.2 million against the same keys in a small tensor."""
    length, left = 4_200_000, 500
    kv = torch.empty(length, 1, 512, dtype=BF16, device="cuda")
    assert kv.numel() > 2**31
    small = normal(left, 1, 512)
    kv[-left:] = small
    q, cu = normal(60, 64, 512), int32([0, 60])
    expected = check((q, small, cu, int32([0, left])), 200)
    assert_same(run((q, kv, cu, int32([0, length])), 200), expected)
    indices = select(60, left, 50, 0.0)
    expected = check((q, small, cu, int32([0, left])), 200, (small, indices))
    assert_same(run((q, kv, cu, int32([0, length])), 200, (kv, indices + (length - left))), expected)


@pytest.mark.parametrize("heads", [16, 128])
def test_graph_replay_with_new_data(heads, record_error):
    q, kv, compressed = normal(200, heads, 512), normal(900, 1, 512), normal(300, 1, 512)
    cu_q, cu_k, indices = int32([0] * 9), int32([0] * 9), select(200, 300, 50)
    arguments, sink = (q, kv, cu_q, cu_k), torch.randn(heads, device="cuda")
    options = {"attn_sink": sink}

    def both():
        return run(arguments, 100, **options), run(arguments, 100, (compressed, indices), **options)

    both()  # compile outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        alone, joined = both()
    for _ in range(4):
        for x in (q, kv, compressed):
            x.copy_(normal(*x.shape))
        indices.copy_(select(200, 300, 50))
        cu_q.copy_(torch.randint(0, 201, (9,)).sort().values)
        cu_k.copy_(torch.randint(0, 901, (9,)).sort().values)
        sink.normal_()
        graph.replay()
        check(arguments, 100, None, record_error, got=alone, **options)
        check(arguments, 100, (compressed, indices), record_error, got=joined, **options)


def test_runs_are_bit_identical():
    arguments = packed(heads=128)
    selected = normal(900, 1, 512), select(len(arguments[0]), 900, 512)
    first = *run(arguments, 128), *run(arguments, 128, selected)
    for _ in range(30):
        assert_same((*run(arguments, 128), *run(arguments, 128, selected)), first)


# name -> d, dtype of q
LAYOUTS = {"bf16, 512": (512, BF16), "bf16, 576": (576, BF16), "fp16, 512": (512, FP16)}
LAYOUTS |= {"656 bytes": (576, BF16), "584 bytes": (512, BF16)}
LENGTHS = [0, 1, 2, 3, 5, 48, 49, 64, 127, 128, 130, 500, 1001]


class Cached:
    """Queries and a cache with nothing but what their windows hold; all else is NaN, and no page the table's rest."""

    def __init__(self, layout="584 bytes", lengths=LENGTHS, s_q=1, heads=64, window=128, page=64, ring=False):
        self.d, dtype = LAYOUTS[layout]
        self.fp8, self.window, batch = "bytes" in layout, window, len(lengths)
        self.q = normal(batch, s_q, heads, self.d, dtype=dtype)
        columns = 1 + max(lengths) // page
        pages = batch if ring else batch * columns + 3
        shape = (pages, page, 1, int(layout[:3]) if self.fp8 else self.d)
        self.cache = poisoned(shape, torch.uint8 if self.fp8 else dtype, "cuda")
        if layout == "584 bytes":
            self.cache = kv_cache.make_v4_cache(pages, page, "cuda")
            self.cache.as_strided((pages * self.cache.stride(0),), (1,)).fill_(0xFF)
        self.table, self.lengths = None, int32(lengths)
        if not ring:
            self.table = torch.randperm(pages, device="cuda")[: batch * columns].view(batch, columns).int()
        for b, length in enumerate(lengths):
            position = torch.arange(max(0, length - s_q - window + 1), length, device="cuda")
            slots = self.slots(b, position)
            kv_cache.write_kv_cache(normal(len(position), self.d, dtype=torch.float32), self.cache, slots)
            if not ring:
                self.table[b, -(-length // page) :] = 2**31 - 1

    def slots(self, b, position):
        """Where these positions of sequence b lie."""
        page = self.cache.shape[1]
        return (b if self.table is None else self.table[b, position // page].long()) * page + position % page

    def arguments(self, **changes):
        named = {"q": self.q, "cache": self.cache, "block_table": self.table, "cache_seqlens": self.lengths}
        named |= {"window": self.window, "softmax_scale": self.d**-0.5, "is_fp8_kvcache": self.fp8}
        return named | changes

    def run(self, **changes):
        return dsa.sliding_window_decode(**self.arguments(**changes))

    def check(self, record_error=None, got=None, **changes):
        poison_free_memory(mebibytes=64)
        out, lse = self.run(**changes) if got is None else got
        named = self.arguments(**changes)
        expected, expected_lse = window_decode.sliding_window_decode(**named | {"q": named["q"].float()})
        assert out.dtype == self.q.dtype and out.is_contiguous() and lse.dtype == torch.float32
        error = assert_close("out", out, expected, **DECODE)
        assert_close("lse", lse, expected_lse, **DECODE_LSE)
        if record_error:
            record_error(error)
        return out, lse


@pytest.mark.parametrize("heads", [1, 8, 16, 64, 80, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_decode_heads(layout, heads, record_error):
    Cached(layout, heads=heads, s_q=2).check(record_error, attn_sink=torch.randn(heads, device="cuda"))
    Cached(layout, heads=heads, s_q=2, page=130, ring=True).check(record_error)


@pytest.mark.parametrize("page", [48, 64])
@pytest.mark.parametrize("s_q", [1, 2, 3, 4])
@pytest.mark.parametrize("window", [1, 7, 128, 1000])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_decode_over_pages(layout, window, s_q, page, record_error):
    out, lse = Cached(layout, s_q=s_q, heads=16, window=window, page=page).check(record_error)
    assert out[0].eq(0).all() and lse[0].eq(INF).all() and lse[1, :, :-1].eq(INF).all()


@pytest.mark.parametrize("s_q", [1, 2, 3, 4])
@pytest.mark.parametrize("window", [1, 7, 128, 1000])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_decode_over_rings(layout, window, s_q, record_error):
    for page in (window + s_q - 1, 1024):
        Cached(layout, s_q=s_q, heads=16, window=window, page=page, ring=True).check(record_error)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_sequences(layout, record_error):
    for batch in (1, 131, 133, 600):
        lengths = torch.randint(0, 400, (batch,)).tolist()
        Cached(layout, lengths, 1, 64, page=256, ring=True).check(record_error)
        Cached(layout, lengths, 1, 16).check(record_error)


def test_decode_sinks(record_error):
    case = Cached(heads=8, s_q=2)
    out, lse = case.check(record_error, attn_sink=torch.tensor(SINKS, device="cuda"))
    plain, plain_lse = case.run()
    assert torch.equal(lse, plain_lse) and torch.equal(out[:, :, 0], plain[:, :, 0]) and not out[:, :, [1, 7]].any()


@pytest.mark.parametrize("layout", ["bf16, 512", "656 bytes", "584 bytes"])
def test_pages_that_are_not_there(layout, record_error):
    """They hold no keys. Nor does what is far beyond the table, or before a sequence."""
    case = Cached(layout, [500] * 9, 2, window=300)
    bad = int32([-1, -(2**31), 2**31 - 1, len(case.cache), 2**25])
    spoiled = bad[torch.randint(5, case.table.shape, device="cuda")]
    case.table = torch.where(torch.rand(case.table.shape, device="cuda") < 0.4, spoiled, case.table)
    case.table[3] = -1
    out, lse = case.check(record_error)
    assert out[3].eq(0).all() and lse[3].eq(INF).all()
    out, lse = case.run(cache_seqlens=int32([500, 0, -1, -(2**31), 2**31 - 1, 500, 500, 500, 500]))
    assert out[1:5].eq(0).all() and lse[1:5].eq(INF).all()


def test_decode_is_sparse_attention_to_these_slots():
    for ring in (False, True):
        case = Cached(s_q=2, page=256, ring=ring)
        slots = dsa.window_slots(case.table, case.lengths, 2, 256, 128)
        got = dsa.flash_mla_with_kvcache(
            case.q, case.cache, None, None, D_V, None, softmax_scale=case.d**-0.5, is_fp8_kvcache=True, indices=slots
        )
        assert_same(got, case.run())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_ring_holds_what_pages_hold(layout):
    """The same keys, the same bits."""
    case = Cached(layout, s_q=2)
    ring = Cached(layout, s_q=2, page=256, ring=True)
    for b, length in enumerate(LENGTHS):
        at = torch.arange(max(0, length - 129), length, device="cuda")
        rows = kv_cache.read_kv_cache(case.cache, case.slots(b, at))
        kv_cache.write_kv_cache(rows, ring.cache, ring.slots(b, at))
    ring.q = case.q
    if case.fp8:  # quantised anew: not always to the same bytes
        ring.check()
    else:
        assert_same(ring.run(), case.run())


@pytest.mark.parametrize("layout", ["bf16, 512", "656 bytes", "584 bytes"])
def test_short_windows_do_not_depend_on_the_batch(layout):
    case = Cached(layout, torch.randint(0, 600, (200,)).tolist(), 2, 128, window=128)
    out, lse = case.run()
    for rows in (
        torch.randperm(200, device="cuda"),
        torch.arange(7, device="cuda"),
        torch.tensor([150], device="cuda"),
    ):
        part = {"q": case.q[rows], "block_table": case.table[rows], "cache_seqlens": case.lengths[rows]}
        assert_same(case.run(**part), (out[rows], lse[rows]))


@pytest.mark.parametrize(("batch", "s_q", "heads"), [(0, 1, 64), (3, 0, 64), (3, 1, 0)])
@pytest.mark.parametrize("layout", ["bf16, 512", "584 bytes"])
def test_nothing_to_decode(layout, batch, s_q, heads):
    case = Cached(layout, [9] * 3, 1, 64)
    q = normal(batch, s_q, heads, case.d)
    part = {"q": q, "block_table": case.table[:batch], "cache_seqlens": case.lengths[:batch]}
    out, lse = case.run(**part)
    assert out.shape == (batch, s_q, heads, D_V) and lse.shape == (batch, heads, s_q)
    for changes in ({"cache": case.cache[:0]}, {"block_table": case.table[:, :0]}, {"cache_seqlens": int32([0] * 3)}):
        out, lse = case.check(**changes)
        assert out.eq(0).all() and lse.eq(INF).all()


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(
    ("layout", "batch", "heads"), [("584 bytes", 40, 64), ("bf16, 512", 3, 16), ("656 bytes", 1, 128)]
)
def test_decode_graph_replay(layout, batch, heads, ring, record_error):
    """New queries, keys, tables and lengths: none, few, many."""

    def fresh(low, high):
        lengths = [999, *torch.randint(low, high, (batch,)).tolist()]  # as many pages whatever the others are
        return Cached(layout, lengths, 2, heads, 100, 128 if ring else 48, ring)

    case, sink = fresh(0, 1), torch.randn(heads, device="cuda")
    case.run(attn_sink=sink)  # compile outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = case.run(attn_sink=sink)
    for low, high in ((0, 1), (0, 5), (90, 110), (0, 1000)):
        new = fresh(low, high)
        for name in ("q", "cache", "table", "lengths"):
            if getattr(case, name) is not None:
                getattr(case, name).copy_(getattr(new, name))
        sink.normal_()
        graph.replay()
        case.check(record_error, got=got, attn_sink=sink)


def test_another_stream():
    arguments, case = packed(heads=128), Cached()
    expected = *run(arguments, 128), *case.run()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        got = [(*run(arguments, 128), *case.run()) for _ in range(20)]
        torch.cuda.current_stream().synchronize()
    for results in got:
        assert_same(results, expected)


@pytest.mark.several_gpus
def test_tensors_on_another_gpu_than_the_current_one():
    arguments, case = packed(), Cached()
    expected = *run(arguments, 128), *case.run()
    moved = {n: x.to("cuda:1") for n, x in case.arguments().items() if isinstance(x, torch.Tensor) and n != "cache"}
    moved["cache"] = torch.empty_strided(case.cache.shape, case.cache.stride(), dtype=torch.uint8, device="cuda:1")
    moved["cache"].copy_(case.cache)
    with torch.cuda.device(0):
        got = *run([x.to("cuda:1") for x in arguments], 128), *case.run(**moved)
    assert_same([x.cpu() for x in got], [x.cpu() for x in expected])


def test_inputs_are_not_written():
    arguments, case = packed(), Cached()
    selected = normal(300, 1, 512), select(len(arguments[0]), 300, 50)
    tensors = (*arguments, *selected, case.q, case.cache, case.table, case.lengths)
    before = [x.clone() for x in tensors]
    run(arguments, 128, selected)
    case.run()
    for x, y in zip(tensors, before):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)) if x.dtype == BF16 else torch.equal(x, y)


def test_torch_compile():
    arguments, case = packed(), Cached()
    selected = normal(300, 1, 512), select(len(arguments[0]), 300, 50)

    def layer(arguments, selected, named):
        near = dsa.window_indices(*arguments[2:], arguments[0].shape[0], 128)
        return (
            *run(arguments, 128, indices=near),
            *run(arguments, 128, selected, window_indices=near),
            *dsa.sliding_window_decode(**named),
        )

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same(compiled(arguments, selected, case.arguments()), layer(arguments, selected, case.arguments()))


def test_fp32_runs_the_reference_and_says_so():
    arguments, case = packed(), Cached("bf16, 512")
    selected = normal(300, 1, 512, dtype=torch.float32), select(len(arguments[0]), 300, 50)
    fp32 = {"q": case.q.float(), "cache": case.cache.float()}
    wide = [x.float() if x.is_floating_point() else x for x in arguments]
    for name, call, expected in (
        ("sliding_window_attention", lambda: run(wide, 9), lambda: expected_of(wide, 9)),
        ("window_sparse_attention", lambda: run(wide, 9, selected), lambda: expected_of(wide, 9, selected)),
        ("sliding_window_decode", lambda: case.run(**fp32), None),
    ):
        dsa.backends._warned.discard(f"{name} in float32")
        with pytest.warns(UserWarning, match=f"{name} in float32 has no Hopper kernel"):
            got = call()
        named = case.arguments(**fp32)
        assert_same(got, window_decode.sliding_window_decode(**named) if expected is None else expected())
