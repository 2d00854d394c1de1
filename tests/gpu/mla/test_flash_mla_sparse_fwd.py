"""Sparse MLA prefill on the GPU against the fp32 reference: FlashMLA's tolerances, and indices of every kind."""

import math

import pytest
import torch

import dsa
from dsa.reference.mla import flash_mla_sparse_fwd as reference
from dsa.testing import assert_close, poison_free_memory
from tests.gpu.attention import (
    BF16,
    D_V,
    INF,
    KINDS,
    NAN,
    SINKS,
    assert_attention,
    assert_writes_a_part,
    distinct,
    int32,
    no_keys,
    normal,
    spoiled,
)
from tests.gpu.op_checks import (
    among_nan,
    assert_runs_have_the_same_bits,
    assert_runs_on_the_current_stream,
    assert_same_bits,
    assert_same_on_the_second_gpu,
    replays,
)

TILE = 64
TOLERANCE = {"abs_tol": 8e-4, "rel_tol": 3.01 / 128, "cos_tol": 7e-6}
LSE_TOLERANCE = {"abs_tol": 1e-6, "rel_tol": 2.01 / 65536}


def inputs(s_q=5, heads=128, s_kv=5000, k=512, d=576, dtype=BF16):
    return normal(s_q, heads, d, dtype=dtype), normal(s_kv, 1, d, dtype=dtype), distinct(s_q, s_kv, k)[:, None]


def run(q, kv, indices, scale=None, **options):
    return dsa.flash_mla_sparse_fwd(q, kv, indices, q.shape[2] ** -0.5 if scale is None else scale, **options)


def expected_of(q, kv, indices, scale=None, **options):
    scale = q.shape[2] ** -0.5 if scale is None else scale
    return reference.flash_mla_sparse_fwd(q.float(), kv, indices, scale, **options)


def check(q, kv, indices, record_error=None, got=None, **options):
    poison_free_memory(mebibytes=64)
    got = run(q, kv, indices, **options) if got is None else got
    assert got[0].dtype == q.dtype and got[1].is_contiguous() and got[2].is_contiguous()
    assert_attention(got, expected_of(q, kv, indices, **options), TOLERANCE, LSE_TOLERANCE, record_error)
    return got


@pytest.mark.parametrize(("d", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("heads", [1, 8, 16, 32, 64, 80, 128])
def test_heads(heads, d, dtype, record_error):
    q, kv, indices = inputs(33, heads, 3000, 320, d, dtype)
    check(q, kv, spoiled(indices, 3000, 0.1), record_error, attn_sink=torch.randn(heads, device="cuda"))


@pytest.mark.parametrize("d", [576, 512])
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("k", [1, 2, 63, 64, 65, 128, 192, 512, 1000, 2047, 2048])
def test_selected_keys(k, heads, d, record_error):
    check(*inputs(7, heads, 5000, k, d), record_error)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("s_kv", [1, 63, 5000])
@pytest.mark.parametrize("s_q", [0, 1, 3, 257])
def test_lengths(s_q, s_kv, heads, record_error):
    out, *_ = check(*inputs(s_q, heads, s_kv, 200), record_error)
    assert out.shape == (s_q, heads, D_V)


@pytest.mark.parametrize(("d", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize(("s_q", "heads"), [(1, 1), (1, 128), (20, 64), (131, 64), (133, 128), (1500, 128)])
def test_a_chunk(s_q, heads, d, dtype, record_error):
    """Fewer queries than multiprocessors, about as many, and more, with all the keys that V3.2 selects."""
    check(*inputs(s_q, heads, 8192, 2048 if s_q < 1000 else 512, d, dtype), record_error)


@pytest.mark.parametrize(
    ("heads", "s_q", "s_kv", "k"),
    [(128, 3, 100, 0), (16, 1, 100, 0), (128, 0, 100, 64), (0, 3, 100, 64), (0, 0, 100, 0), (64, 5, 0, 64)],
)
@pytest.mark.parametrize("d", [576, 512])
def test_without_keys_results_are_zero(d, heads, s_q, s_kv, k):
    q, kv, indices = inputs(s_q, heads, s_kv, k, d)
    for listed in (indices, spoiled(indices, s_kv, 1.0)):
        out, max_logits, lse = check(q, kv, listed, attn_sink=torch.zeros(heads, device="cuda"))
        assert out.shape == (s_q, heads, D_V)
        assert out.eq(0).all() and max_logits.eq(-INF).all() and lse.eq(INF).all()


@pytest.mark.parametrize(("d", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("heads", [1, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("s_q", [1, 200])
def test_into_a_part_of_a_tensor(s_q, heads, d, dtype):
    """Of one with more heads, as where heads are padded, whose other numbers stay as they are; with the same bits."""
    q, kv, indices = inputs(s_q, heads, 3000, 320, d, dtype)
    sink = torch.randn(heads, device="cuda")

    def into(out):
        return run(q, kv, indices, attn_sink=sink, out=out)

    whole, out = assert_writes_a_part(into, run(q, kv, indices, attn_sink=sink))
    run(q, kv[:0], indices, out=out)
    assert not out.any() and whole.isnan().sum() == whole.numel() - out.numel()


LENGTHS = [0, 1, 2, 63, 64, 65, 128, 500, 999, 1000, 1001, 2**31 - 1, -1, -(2**31)]


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("k", [64, 1000, 1024])
def test_topk_length(k, heads, record_error):
    """Also that keys behind it are not looked at: they are NaN."""
    q, kv, indices = inputs(len(LENGTHS), heads, 3000, k)
    poison = 2000 + torch.arange(k, device="cuda") % 1000
    lengths = int32(LENGTHS)
    indices = torch.where(torch.arange(k, device="cuda") < lengths[:, None, None], indices % 2000, poison).int()
    kv[2000:] = NAN
    check(q, kv, indices, record_error, topk_length=lengths)
    for same in (0, k, -5, 2**31 - 1):
        lengths.fill_(same)
        check(q, kv[:2000], indices % 2000, topk_length=lengths)
    check(q, kv[:2000], spoiled(indices % 2000, 2000, 0.3), topk_length=int32(LENGTHS).flip(0))


def test_sinks(record_error):
    q, kv, indices = inputs(50, 8)
    indices[3] = -1
    indices[4, 0, 1:] = -1
    out, *statistics = check(q, kv, indices, record_error, attn_sink=torch.tensor(SINKS, device="cuda"))
    plain = run(q, kv, indices)
    assert_same_bits(statistics, plain[1:])
    assert torch.equal(out[:, 0], plain[0][:, 0]) and not out[:, [1, 7]].any() and out[:3, 3].any()


@pytest.mark.parametrize("d", [576, 512])
@pytest.mark.parametrize("heads", [8, 128])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.98, 1.0])
def test_indices_that_are_no_keys(share, heads, d, record_error):
    q, kv, indices = inputs(41, heads, 1999, 1000, d)
    indices = spoiled(indices, len(kv), share)
    indices[5], indices[6] = -1, len(kv)
    out, max_logits, lse = check(q, kv, indices, record_error)
    assert out[5:7].eq(0).all() and max_logits[5:7].eq(-INF).all() and lse[5:7].eq(INF).all()


@pytest.mark.parametrize("heads", [16, 128])
def test_tiles_without_keys(heads, record_error):
    """Keys in the last place only, in the first, in one tile of many, in every other tile."""
    q, kv, indices = inputs(8, heads, 4000, 640)
    tile = torch.arange(640, device="cuda") // TILE
    place = torch.arange(640, device="cuda")
    kept = [place == 639, place == 0, place == 320, tile == 9, tile == 0, tile == 5, tile % 2 == 0, tile % 2 == 1]
    indices = torch.where(torch.stack(kept)[:, None], indices, no_keys(4000)[place % 6])
    check(q, kv, indices, record_error)


def test_a_key_named_twice_counts_twice(record_error):
    q, kv, indices = inputs(9, 64, 500, 256)
    check(q, kv, indices // 100, record_error)
    indices[0] = 7
    _, max_logits, lse = check(q, kv, indices)
    assert_close("lse", lse[0], max_logits[0].double() + math.log(256), **LSE_TOLERANCE)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("heads", [16, 128])
def test_rows_that_nobody_selects(bad, heads):
    """NaN in half of the keys, and behind what topk_length counts, changes no bit."""
    q, kv, indices = inputs(30, heads, 2000, 500)
    indices = spoiled(indices // 2 * 2, 2000, 0.2)
    lengths = torch.randint(0, 500, (30,), dtype=torch.int32, device="cuda")
    clean = check(q, kv, indices, topk_length=lengths)
    kv[1::2] = bad
    indices = torch.where(torch.arange(500, device="cuda") < lengths[:, None, None], indices, 1999)
    assert_same_bits(run(q, kv, indices, topk_length=lengths), clean)


@pytest.mark.parametrize("s_q", [6, 300])
@pytest.mark.parametrize("heads", [16, 128])
def test_nan_reaches_the_queries_that_select_it(heads, s_q):
    q, kv, indices = inputs(s_q, heads, 2000, 300)
    indices %= 1999
    clean = run(q, kv, indices)
    indices[2, 0, 123] = 1999
    kv[1999, 0, 7] = NAN
    out, max_logits, lse = run(q, kv, indices)
    others = torch.arange(s_q, device="cuda") != 2
    assert out[2].isnan().all() and lse[2].isnan().all()
    assert_same_bits([x[others] for x in (out, max_logits, lse)], [x[others] for x in clean])


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(("scale", "largest"), [(1e-6, -INF), (0.1, -INF), (3.0, -INF), (100.0, 50), (24000.0, 1e4)])
def test_scales(scale, largest, heads, record_error):
    """With large logits a softmax of few keys, and powers that would overflow if they were not relative."""
    _, max_logits, lse = check(*inputs(20, heads, 3000, 1000), record_error, scale=scale)
    assert lse.min() > largest and max_logits.min() > largest


def test_the_maximum_rises_from_tile_to_tile(record_error):
    """By less and by more than O is rescaled for, differently in every head, and falls in half of them. The rope
    channels do it, which are no part of the values."""
    q, kv = normal(6, 64, 576), normal(6 * 1024, 1, 576)
    indices = torch.arange(6 * 1024, dtype=torch.int32, device="cuda").view(6, 1, 1024)
    step = torch.tensor([0.5, 3.0, 6.0, 20.0, 100.0, 0.0], device="cuda")[:, None]
    direction = torch.randn(6, 1, 64, device="cuda").sign()
    q[..., D_V:] = (direction * torch.linspace(-1, 1, 64, device="cuda")[:, None]).bfloat16()
    tile = torch.arange(1024, device="cuda") // TILE
    lift = direction * (tile * step)[..., None] * 576**0.5 / 64
    kv[:, 0, D_V:] = lift.view(-1, 64).bfloat16()
    _, max_logits, _ = check(q, kv, indices, record_error)
    assert max_logits[3, -1] > 290 and max_logits[3, 0] < 1


@pytest.mark.parametrize(("d", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_one_key_gives_its_value_exactly(heads, d, dtype):
    q, kv, _ = inputs(40, heads, 700, 1, d, dtype)
    for k, place in ((1, 0), (64, 63), (200, 131), (700, 699)):
        key = torch.randint(0, 700, (40,), device="cuda")
        indices = no_keys(700)[torch.randint(6, (40, 1, k), device="cuda")]
        indices[:, 0, place] = key.int()
        out, max_logits, lse = run(q, kv, indices)
        assert torch.equal(out, kv[key, :, :D_V].expand(-1, heads, -1))
        logits = (q.double() * kv[key].double()).sum(2) * d**-0.5
        assert_close("max_logits", max_logits, logits, **LSE_TOLERANCE)
        assert_close("lse", lse, logits, **LSE_TOLERANCE)


@pytest.mark.parametrize("d", [576, 512])
def test_strides(d):
    """q, kv and indices as parts of larger tensors, which hold NaN and other keys beside them."""
    q, kv, indices = inputs(20, 32, 600, 333, d)
    sink, lengths = torch.randn(32, device="cuda"), torch.randint(0, 400, (20,), dtype=torch.int32, device="cuda")
    expected = check(q, kv, indices, attn_sink=sink, topk_length=lengths)
    apart_kv = torch.stack((kv, kv * NAN), 1)[:, 0]
    wide_indices = torch.nn.functional.pad(indices, (1, 2), value=5)[..., 1:334]
    options = {
        "attn_sink": torch.stack((sink, sink), 1)[:, 1],
        "topk_length": torch.stack((lengths, lengths), 1)[:, 1],
    }
    for some_q, some_kv, some_indices in (
        (among_nan(q), among_nan(kv), wide_indices),
        (q.transpose(0, 1).contiguous().transpose(0, 1), apart_kv, indices),
        (torch.stack((q, q * NAN), 1)[:, 0], kv, torch.stack((indices, indices + 9), 1)[:, 0]),
    ):
        assert_same_bits(run(some_q, some_kv, some_indices, **options), expected)
    same_q, same_indices = q[:1].expand_as(q), indices[:1].expand_as(indices)
    expected = check(same_q.contiguous(), kv, same_indices.contiguous(), **options)
    assert_same_bits(run(same_q, kv, same_indices, **options), expected)


@pytest.mark.parametrize("heads", [16, 128])
def test_keys_beyond_2_to_the_31_numbers(heads):
    """The last keys of 4 million, and some of the others, against the same keys in a small tensor."""
    s_kv, k = 4_000_000, 700
    kv = torch.empty(s_kv, 1, 576, dtype=BF16, device="cuda")
    assert kv.numel() > 2**31
    rows = torch.randint(0, s_kv, (3000,), device="cuda").unique()
    rows = torch.cat((rows, torch.arange(s_kv - 1000, s_kv, device="cuda"))).unique()
    small = normal(len(rows), 1, 576)
    kv[rows] = small
    q, indices = normal(50, heads, 576), distinct(50, len(rows), k)[:, None]
    indices[0, 0] = len(rows) - 1 - torch.arange(k, device="cuda")
    expected = check(q, small, indices)
    assert_same_bits(run(q, kv, rows[indices.long()].int()), expected)


@pytest.mark.parametrize("heads", [16, 128])
def test_queries_do_not_depend_on_each_other(heads):
    """In another order, few of them, and alone: the same bits."""
    q, kv, indices = inputs(300, heads, 3000, 700)
    whole = run(q, kv, indices)
    for rows in (
        torch.randperm(300, device="cuda"),
        torch.arange(7, device="cuda"),
        torch.tensor([299], device="cuda"),
    ):
        assert_same_bits(run(q[rows], kv, indices[rows]), [x[rows] for x in whole])


@pytest.mark.parametrize(("s_q", "heads"), [(3, 128), (257, 16), (600, 128)])
def test_runs_are_bit_identical(s_q, heads):
    assert_runs_have_the_same_bits(run, *inputs(s_q, heads, 4000, 1000), times=50)


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize(("s_q", "heads"), [(3, 128), (257, 16)])
def test_a_graph_takes_new_data(s_q, heads, into, record_error):
    """into: the caller's memory, a part of more heads."""
    whole = torch.full((s_q, heads + 8, D_V), NAN, dtype=BF16, device="cuda")
    memory = {"out": whole[:, 4:-4]} if into else {}
    shares = iter((0.0, 0.5, 1.0, 0.1))

    def renew():
        q, kv, indices = inputs(s_q, heads, 2000, 500)
        lengths = torch.randint(-10, 600, (s_q,), dtype=torch.int32, device="cuda")
        return q, kv, spoiled(indices, 2000, next(shares)), torch.randn(heads, device="cuda"), lengths

    def call(q, kv, indices, sink, lengths):
        return run(q, kv, indices, attn_sink=sink, topk_length=lengths, **memory)

    given = *inputs(s_q, heads, 2000, 500), torch.randn(heads, device="cuda"), int32([0] * s_q)
    for out, *statistics in replays(call, given, renew, times=4):
        options = {"attn_sink": given[3], "topk_length": given[4]}
        check(*given[:3], record_error, got=(out.contiguous(), *statistics), **options)
        assert whole[:, :4].isnan().all() and whole[:, -4:].isnan().all()


def test_the_kernels_run_on_the_current_stream():
    assert_runs_on_the_current_stream(run, *inputs(300, 128))


@pytest.mark.several_gpus
def test_tensors_on_another_gpu_than_the_current_one():
    assert_same_on_the_second_gpu(run, *inputs(30, 64))


def test_fp32_runs_the_reference_and_says_so():
    q, kv, indices = inputs(3, 8, 100, 64)
    dsa.runtime.backends._warned.discard("flash_mla_sparse_fwd in float32")
    with pytest.warns(UserWarning, match="in float32 has no Hopper kernel"):
        got = run(q.float(), kv.float(), indices)
    assert_same_bits(got, expected_of(q, kv, indices))
