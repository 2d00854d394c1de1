"""Attention to windows on the GPU: packed keys, also with selected ones, against the fp32 reference and float64."""

import pytest
import torch

import dsa
from dsa.reference.cache import kv_cache
from dsa.reference.mla import sliding_window_attention as reference
from dsa.reference.mla import sliding_window_decode as window_decode
from dsa.testing import poison_free_memory
from tests.gpu.attention import BF16, D_V, INF, KINDS, NAN, assert_attention, attend, distinct, int32, normal, spoiled
from tests.gpu.mla.caches import LAYOUTS, empty_cache
from tests.gpu.op_checks import (
    among_nan,
    assert_compiles,
    assert_runs_have_the_same_bits,
    assert_runs_on_the_current_stream,
    assert_same_bits,
    assert_same_on_the_second_gpu,
    replays,
)

PREFILL = {"abs_tol": 8e-4, "rel_tol": 3.01 / 128, "cos_tol": 7e-6}
PREFILL_LSE = {"abs_tol": 1e-6, "rel_tol": 2.01 / 65536}
DECODE = {"abs_tol": 1e-3, "rel_tol": 2.01 / 128, "cos_tol": 5e-6}
DECODE_LSE = {"abs_tol": 1e-6, "rel_tol": 8.01 / 65536}
# Queries and keys of sequences: empty, whole, chunks, without queries, without keys, with less keys than queries.
SEQUENCES = [(0, 0), (1, 1), (50, 50), (0, 30), (17, 300), (3, 0), (130, 130), (5, 2), (1, 900)]
LENGTHS = [0, 1, 2, 3, 5, 48, 49, 64, 127, 128, 130, 500, 1001]


def packed(sequences=SEQUENCES, heads=16, d=512, dtype=BF16):
    """q, kv, cu_seqlens_q, cu_seqlens_k; the last two queries and keys belong to no sequence."""
    ends = torch.tensor([(0, 0), *sequences]).cumsum(0)
    queries, keys = (ends[-1] + 2).tolist()
    return normal(queries, heads, d, dtype=dtype), normal(keys, 1, d, dtype=dtype), *map(int32, ends.T.contiguous())


def select(queries, n, k, invalid=0.1):
    """Every query's rows of n, in any order; that share of them no rows."""
    rows = torch.randint(0, max(n, 1), (queries, k), dtype=torch.int32, device="cuda")
    return spoiled(rows, n, invalid)


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
    got = run(arguments, window, selected, **options) if got is None else got
    expected = expected_of(arguments, window, selected, **options) if expected is None else expected
    assert got[0].dtype == arguments[0].dtype and got[1].is_contiguous()
    assert_attention(got, expected, PREFILL, PREFILL_LSE, record_error)
    return got


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
    out, lse = check(arguments, window, None, record_error, expected=attend(q, kv, kv[..., :D_V], mask, d**-0.5))
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
    indices = distinct(len(q), max(n, k), k)
    indices[3], indices[4, : k // 2] = -1, 2**31 - 1
    lengths, sink = int32([k, 0, -1, 2**31 - 1, k // 2, 1]).repeat(20)[: len(q)], torch.randn(16, device="cuda")
    keys, near = torch.cat((kv, compressed)), window_mask(SEQUENCES[:6], window, len(q), len(kv))
    for counts in (None, lengths):
        counted = indices if counts is None else indices.where(torch.arange(k, device="cuda") < counts[:, None], -1)
        far = torch.zeros(len(q), n + 1, dtype=torch.bool, device="cuda")
        far.scatter_(1, torch.where((counted >= 0) & (counted < n), counted, n).long(), True)
        expected = attend(q, keys, keys[..., :D_V], torch.cat((near, far[:, :n]), 1), d**-0.5, sink)
        options = {"topk_length": counts, "attn_sink": sink}
        check(arguments, window, (compressed, indices), record_error, expected=expected, **options)


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("length", [131, 133, 3000])
def test_a_chunk(length, heads, record_error):
    """About as many queries as multiprocessors, and more; V4's numbers."""
    arguments = packed([(length, length + 5000)], heads)
    selected = normal(1250, 1, 512), select(len(arguments[0]), 1250, 512)
    check(arguments, 128, None, record_error)
    check(arguments, 128, selected, record_error, attn_sink=torch.randn(heads, device="cuda"))


@pytest.mark.parametrize("selected", [False, True])
def test_a_list_made_before_gives_the_same_bits(selected):
    arguments = packed()
    total = len(arguments[0])
    more = (normal(300, 1, 512), select(total, 300, 50)) if selected else None
    for window in (7, 128, 3000):
        near = dsa.window_indices(*arguments[2:], total, window)
        name = "window_indices" if selected else "indices"
        assert_same_bits(run(arguments, window, more, **{name: near}), run(arguments, window, more))


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
        assert_same_bits(run(arguments, 50), alone)
        assert_same_bits(run(arguments, 50, (compressed, indices)), joined)


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


def test_without_any_keys_results_are_zero():
    q, kv, cu_q, cu_k = packed()
    none, (compressed, indices) = int32([0] * len(cu_q)), (normal(30, 1, 512), select(len(q), 30, 9, 0.0))
    nothing = (None, (compressed[:0], indices), (compressed, indices[:, :0]))
    for arguments in ((q, kv[:0], cu_q, none), (q, kv, none, cu_k), (q, kv, int32([0]), int32([0]))):
        for more in nothing:
            out, lse = check(arguments, 128, more)
            assert out.eq(0).all() and lse.eq(INF).all()
        check(arguments, 128, (compressed, indices))
    for more in nothing[1:]:
        assert_same_bits(check((q, kv, cu_q, cu_k), 128, more), run((q, kv, cu_q, cu_k), 128))


@pytest.mark.parametrize("d", [576, 512])
def test_strides(d):
    """All as parts of larger tensors, which hold NaN and other numbers around them."""
    q, kv, cu_q, cu_k = packed(heads=32, d=d)
    compressed, indices = normal(300, 1, d), select(len(q), 300, 50)
    options = {"attn_sink": torch.randn(32, device="cuda"), "topk_length": int32([40]).repeat(len(q))}
    expected = run((q, kv, cu_q, cu_k), 100, (compressed, indices), **options)
    wide = [among_nan(x) for x in (q, kv, compressed)]
    apart = [torch.stack((x, -x), 1)[:, 0] for x in (cu_q, cu_k)]
    others = torch.nn.functional.pad(indices, (1, 2), value=5)[:, 1:51]
    two = {name: torch.stack((x, x + 1), 1)[:, 0] for name, x in options.items()}
    assert_same_bits(run((wide[0], wide[1], *apart), 100, (wide[2], others), **two), expected)
    near = dsa.window_indices(cu_q, cu_k, len(q), 100).repeat_interleave(2, 1)[:, ::2]
    turned = q.transpose(0, 1).contiguous().transpose(0, 1)
    got = run((turned, kv, cu_q, cu_k), 100, (compressed, indices), window_indices=near, **options)
    assert_same_bits(got, expected)


def test_keys_beyond_2_to_the_31_numbers():
    """The last keys of 4.2 million against the same keys in a small tensor."""
    length, left = 4_200_000, 500
    kv = torch.empty(length, 1, 512, dtype=BF16, device="cuda")
    assert kv.numel() > 2**31
    small = normal(left, 1, 512)
    kv[-left:] = small
    q, cu = normal(60, 64, 512), int32([0, 60])
    expected = check((q, small, cu, int32([0, left])), 200)
    assert_same_bits(run((q, kv, cu, int32([0, length])), 200), expected)
    indices = select(60, left, 50, 0.0)
    expected = check((q, small, cu, int32([0, left])), 200, (small, indices))
    assert_same_bits(run((q, kv, cu, int32([0, length])), 200, (kv, indices + (length - left))), expected)


class Cached:
    """Queries and a cache with nothing but what their windows hold; all else is NaN, and no page the table's rest."""

    def __init__(self, layout="584 bytes", lengths=LENGTHS, s_q=2, heads=64, window=128, page=64, ring=False):
        self.d, dtype = LAYOUTS[layout]
        self.q = normal(len(lengths), s_q, heads, self.d, dtype=dtype)
        columns = 1 + max(lengths) // page
        pages = len(lengths) if ring else len(lengths) * columns + 3
        self.cache, self.lengths, self.table = empty_cache(layout, pages, page), int32(lengths), None
        if not ring:
            self.table = torch.randperm(pages, device="cuda")[:-3].view(len(lengths), columns).int()
        for b, length in enumerate(lengths):
            position = torch.arange(max(0, length - s_q - window + 1), length, device="cuda")
            first = b if ring else self.table[b, position // page].long()
            rows = normal(len(position), self.d, dtype=torch.float32)
            kv_cache.write_kv_cache(rows, self.cache, first * page + position % page)
            if not ring:
                self.table[b, -(-length // page) :] = 2**31 - 1
        self.options = {"window": window, "softmax_scale": self.d**-0.5, "is_fp8_kvcache": "bytes" in layout}

    def tensors(self):
        return self.q, self.cache, self.table, self.lengths

    def run(self, *tensors, **options):
        """Of other tensors, if there are any."""
        q, cache, table, lengths = tensors or self.tensors()
        named = {"block_table": table, "cache_seqlens": lengths, **self.options, **options}
        return dsa.sliding_window_decode(q, cache, **named)

    def check(self, record_error=None, got=None, **options):
        poison_free_memory(mebibytes=64)
        got = self.run(**options) if got is None else got
        named = {"block_table": self.table, "cache_seqlens": self.lengths, **self.options, **options}
        expected = window_decode.sliding_window_decode(self.q.float(), self.cache, **named)
        assert got[0].dtype == self.q.dtype
        assert_attention(got, expected, DECODE, DECODE_LSE, record_error)
        return got


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(
    ("window", "s_q", "heads", "page"),
    [(1, 1, 16, 64), (7, 4, 64, 48), (128, 1, 8, 64), (128, 2, 1, 256), (128, 3, 128, 48), (1000, 4, 80, 64)],
)
@pytest.mark.parametrize("layout", ["bf16, 576", "bf16, 512", "fp16, 512", "656 bytes", "584 bytes"])
def test_decoding_is_sparse_attention_to_the_windows_slots(layout, window, s_q, heads, page, ring, record_error):
    """Bit for bit: of pages, of which some are not there, and of rings."""
    page = max(page, window + s_q - 1) if ring else page
    case, sink = Cached(layout, LENGTHS, s_q, heads, window, page, ring), torch.randn(heads, device="cuda")
    out, lse = case.check(record_error, attn_sink=sink)
    assert out[0].eq(0).all() and lse[0].eq(INF).all() and lse[1, :, :-1].eq(INF).all()
    if not ring:
        bad = int32([-1, -(2**31), 2**31 - 1, len(case.cache), 2**25])[
            torch.randint(5, case.table.shape, device="cuda")
        ]
        case.table = torch.where(torch.rand(case.table.shape, device="cuda") < 0.4, bad, case.table)
    slots = dsa.window_slots(case.table, case.lengths, s_q, page, window)
    options = {"softmax_scale": case.d**-0.5, "is_fp8_kvcache": "bytes" in layout, "attn_sink": sink}
    expected = dsa.flash_mla_with_kvcache(case.q, case.cache, None, None, D_V, None, indices=slots, **options)
    assert_same_bits(case.check(record_error, attn_sink=sink), expected)


@pytest.mark.parametrize("heads", [16, 128])
def test_a_graph_takes_new_data(heads, record_error):
    """cu_seqlens of nothing at first."""
    sizes = (200, heads, 512), (900, 1, 512), (300, 1, 512)

    def inputs(queries=200, keys=900):
        cu_q, cu_k = (int32(torch.randint(0, most + 1, (9,)).sort().values) for most in (queries, keys))
        q, kv, compressed = (normal(*size) for size in sizes)
        return (q, kv, cu_q, cu_k), (compressed, select(200, 300, 50)), torch.randn(heads, device="cuda")

    def both(arguments, selected, sink):
        return run(arguments, 100, attn_sink=sink), run(arguments, 100, selected, attn_sink=sink)

    given = arguments, selected, sink = inputs(0, 0)
    for alone, joined in replays(both, given, inputs, times=4):
        check(arguments, 100, None, record_error, got=alone, attn_sink=sink)
        check(arguments, 100, selected, record_error, got=joined, attn_sink=sink)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(
    ("layout", "batch", "heads"), [("584 bytes", 40, 64), ("bf16, 512", 3, 16), ("656 bytes", 1, 128)]
)
def test_decoding_in_a_graph_takes_new_data(layout, batch, heads, ring, record_error):
    """New queries, keys, tables and lengths: none, few, many."""

    def fresh(low, high):
        lengths = [999, *torch.randint(low, high, (batch,)).tolist()]  # as many pages whatever the others are
        return Cached(layout, lengths, 2, heads, 100, 128 if ring else 48, ring)

    case, bounds = fresh(0, 1), iter([(0, 1), (0, 5), (90, 110), (0, 1000)])
    for got in replays(case.run, case.tensors(), lambda: fresh(*next(bounds)).tensors(), times=4):
        case.check(record_error, got=got)


def every_op(arguments, selected, decoded):
    """decoded: the tensors of a `Cached`."""
    q, cache, table, lengths = decoded
    near = dsa.window_indices(*arguments[2:], arguments[0].shape[0], 128)
    return (
        run(arguments, 128, indices=near),
        run(arguments, 128, selected, window_indices=near),
        dsa.sliding_window_decode(q, cache, table, lengths, 128, 512**-0.5, is_fp8_kvcache=True),
    )


def inputs_of_every_op(heads=64):
    arguments = packed(heads=heads)
    return arguments, (normal(900, 1, 512), select(len(arguments[0]), 900, 512)), Cached(heads=heads).tensors()


@pytest.mark.parametrize("heads", [16, 128])
def test_runs_are_bit_identical(heads):
    assert_runs_have_the_same_bits(every_op, *inputs_of_every_op(heads), times=30)


def test_the_kernels_run_on_the_current_stream():
    assert_runs_on_the_current_stream(every_op, *inputs_of_every_op())


@pytest.mark.several_gpus
def test_tensors_on_another_gpu_than_the_current_one():
    arguments, selected, decoded = inputs_of_every_op()

    def call(*tensors):
        return every_op(tensors[:4], tensors[4:6], tensors[6:])

    assert_same_on_the_second_gpu(call, *arguments, *selected, *decoded)


def test_torch_compile():
    assert_compiles(every_op, *inputs_of_every_op())
