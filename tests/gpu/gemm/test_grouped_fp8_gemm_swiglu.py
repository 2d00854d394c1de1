"""Experts' first half on the GPU: bit by bit its product, SwiGLU and cast; and rows and weights of the products."""

import pytest
import torch

import dsa
from dsa.kernels.gemm import fp8_gemm_sm90 as kernels
from dsa.ops._kernel_arguments import dtype_name
from dsa.ops.gemm import fp8_gemm_nt as bridge
from dsa.testing import poison_free_memory
from tests.gpu.gemm import hostile
from tests.gpu.gemm.test_fp8_fp4_gemm_nt import activations, weights

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Rows of matrices: full and all but empty last tiles of either height, and warps with one row.
TAILS = [1, 15, 16, 17, 31, 32, 33, 63, 64, 0, 65, 127, 128, 129, 191, 193, 0, 257]


def routed(tokens, experts, k):
    """(rows, ends) of tokens that go to k experts each."""
    chosen = torch.rand(tokens, experts, device="cuda").argsort(-1)[:, :k]
    order, _, ends = dsa.sort_by_expert(chosen, experts)
    return order // k, ends


def same(got, expected, record_error=None):
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and x.is_contiguous()
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
    if record_error:
        record_error(0.0)


@pytest.mark.parametrize("use_ue8m0", [False, True])
@pytest.mark.parametrize("limit", [None, 1.5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "inner", "channels"), [(1, 128, 128), (37, 384, 1024), (700, 2048, 512)])
def test_is_what_it_is_made_of(tokens, inner, channels, dtype, limit, use_ue8m0, record_error):
    a, b = activations(tokens, channels), weights(8, 2 * inner, channels)
    wide = dsa.widen_fp4(*b[:2])
    rows, ends = routed(tokens, 8, 3)
    gate_up = dsa.grouped_fp8_gemm_nt(a, wide, ends, dtype, rows=rows)
    expected = dsa.swiglu_cast_to_fp8(*gate_up.chunk(2, -1), use_ue8m0, limit=limit)
    options = {"rows": rows, "limit": limit, "use_ue8m0": use_ue8m0, "dtype": dtype}
    poison_free_memory(mebibytes=64)
    same(dsa.grouped_fp8_gemm_swiglu(a, wide, ends, **options), expected, record_error)
    poison_free_memory(mebibytes=64)
    same(dsa.grouped_fp8_fp4_gemm_swiglu(a, b, ends, **options), expected, record_error)


def test_rows_that_are_copied(record_error):
    """More than a kernel gathers."""
    a, b = activations(1400, 256), dsa.widen_fp4(*weights(8, 256, 256)[:2])
    rows, ends = routed(1400, 8, 3)
    gate_up = dsa.grouped_fp8_gemm_nt(a, b, ends, rows=rows)
    poison_free_memory(mebibytes=64)
    same(
        dsa.grouped_fp8_gemm_swiglu(a, b, ends, rows=rows), dsa.swiglu_cast_to_fp8(*gate_up.chunk(2, -1)), record_error
    )


@pytest.mark.parametrize("channels", [1024, 640])
@pytest.mark.parametrize("count", [1, 8, 300, 2000])
def test_rows_of_one_token(count, channels, record_error):
    """With a stride of 0, by every kernel that so many rows have: the bits of as many copies."""
    (q, s), b = activations(1, channels), weights(8, 256, channels)
    wide, dense = dsa.widen_fp4(*b[:2]), (torch.rand(8, device="cuda") * count / 8).int().cumsum(0).int()
    dense[-1] = count
    same_rows = q.expand(count, -1), s.expand(count, -1)
    copies = tuple(x.contiguous() for x in same_rows)
    poison_free_memory(mebibytes=64)
    for op, matrices in ((dsa.grouped_fp8_gemm_nt, wide), (dsa.grouped_fp8_fp4_gemm_nt, b)):
        same([op(same_rows, matrices, dense)], [op(copies, matrices, dense)])
    for op, matrices in ((dsa.grouped_fp8_gemm_swiglu, wide), (dsa.grouped_fp8_fp4_gemm_swiglu, b)):
        same(op(same_rows, matrices, dense), op(copies, matrices, dense), record_error)
    one = wide[0][0], wide[1][0]
    same([dsa.fp8_gemm_nt(same_rows, one)], [dsa.fp8_gemm_nt(copies, one)])


# (gathered, drawn) of each of the kernel's tiles.
KINDS = [(config, *kind) for config in kernels.SWIGLU_CONFIGS for kind in ((False, False), (True, False))]
KINDS.append((kernels.SWIGLU_CONFIGS[-1], False, True))


def launched(config, a, b, ends, variant, rows=None, drawn=False, out=None, ctas=None):
    """(q, scale) of the kernel with work tiles of `config`, written to `out` if there is one; variant: (dtype,
    use_ue8m0, limit)."""
    (q, s), (w, ws), (dtype, use_ue8m0, limit) = a, b, variant
    if out is None:
        poison_free_memory(mebibytes=16)
        count, inner = len(q if rows is None else rows), w.shape[1] // 2
        out = q.new_empty(count, inner), q.new_empty(count, inner // 128, dtype=torch.float32)
    kind = use_ue8m0, limit is not None, config, rows is not None, drawn
    counter = torch.zeros(1, dtype=torch.int32, device="cuda") if drawn else None
    scales = bridge.aligned_scales(s), bridge.aligned_scales(ws).permute(1, 2, 0)
    kernels.compile_fp8_gemm_swiglu(dtype_name(dtype), *kind)(
        *(q, scales[0], rows, w.view(-1, w.shape[-1]), scales[1], ends),
        *(*out, limit, counter, dsa.num_sms(q.device) if ctas is None else ctas),
    )
    return out


@pytest.mark.parametrize(
    "variant",
    [
        (torch.bfloat16, True, None),
        (torch.bfloat16, False, 1.5),
        (torch.float16, True, 1.5),
        (torch.float32, False, None),
    ],
    ids=str,
)
@pytest.mark.parametrize(("inner", "channels"), [(128, 160), (384, 1152)])
def test_every_tile_gives_the_same_bits(inner, channels, variant):
    dtype, use_ue8m0, limit = variant
    a, b = activations(sum(TAILS), channels), dsa.widen_fp4(*weights(len(TAILS), 2 * inner, channels)[:2])
    ends = torch.tensor(TAILS).cumsum(0, dtype=torch.int32).cuda()
    gate_up = dsa.grouped_fp8_gemm_nt(a, b, ends, dtype)
    expected = dsa.swiglu_cast_to_fp8(*gate_up.chunk(2, -1), use_ue8m0, limit=limit)
    order = torch.randperm(len(gate_up), device="cuda")
    mixed = tuple(torch.empty_like(x.view(torch.uint8)).index_copy_(0, order, x.view(torch.uint8)) for x in a)
    mixed = tuple(x.view(own.dtype) for x, own in zip(mixed, a, strict=True))
    for config, gathered, drawn in KINDS:
        operand, rows = (mixed, order.int()) if gathered else (a, None)
        same(launched(config, operand, b, ends, variant, rows, drawn), expected)
        if drawn:
            same(launched(config, operand, b, ends, variant, rows, drawn, ctas=3), expected)


@pytest.mark.parametrize(("ends", "rows_of"), hostile.ENDS, ids=str)
def test_nothing_outside_the_rows_is_written(ends, rows_of):
    """As of the product: rows that are a weight's are right, all others and the memory around stay as they were."""
    a, b = activations(64, 256), dsa.widen_fp4(*weights(4, 256, 256)[:2])
    numbers = torch.tensor(ends, dtype=torch.int32, device="cuda")
    every = torch.arange(64, dtype=torch.int32, device="cuda")
    gate_up = dsa.grouped_fp8_gemm_nt(a, b, numbers)
    own = dsa.swiglu_cast_to_fp8(*gate_up.chunk(2, -1))
    around = torch.full((192, 128), 7.0, device="cuda").to(a[0].dtype), torch.full((192, 1), 7.0, device="cuda")
    expected = tuple(x.clone() for x in around)
    for begin, end in rows_of.values():
        for x, part in zip(expected, own, strict=True):
            x.view(torch.uint8)[64 + begin : 64 + end] = part.view(torch.uint8)[begin:end]
    for config, gathered, drawn in KINDS:
        guarded = tuple(x.clone() for x in around)
        out = tuple(x[64:128] for x in guarded)
        variant = torch.bfloat16, True, None
        launched(config, a, b, numbers, variant, every if gathered else None, drawn, out)
        same(guarded, expected)


@pytest.mark.parametrize("sizes", [TAILS, [*TAILS[::-1], 0], *hostile.SIZES], ids=str)
def test_no_tile_writes_behind_the_last_end(sizes):
    """As of the product."""
    used, behind = sum(sizes), 300
    a, b = activations(used, 256), dsa.widen_fp4(*weights(len(sizes), 256, 256)[:2])
    ends = hostile.ends_of(sizes)
    own = dsa.swiglu_cast_to_fp8(*dsa.grouped_fp8_gemm_nt(a, b, ends).chunk(2, -1))
    more = tuple(hostile.with_nan_behind(x, behind) for x in a)
    numbers = hostile.with_no_rows_behind(torch.arange(used, device="cuda", dtype=torch.int32), behind)
    for config, gathered, drawn in KINDS:
        out = (
            torch.full((used + behind, 128), 7.0, device="cuda").to(a[0].dtype),
            more[1].new_full((len(more[1]), 1), 7.0),
        )
        launched(config, more, b, ends, (torch.bfloat16, True, None), numbers if gathered else None, drawn, out)
        same((out[0][:used], out[1][:used]), own)
        assert out[0][used:].float().eq(7).all() and out[1][used:].eq(7).all(), (config, gathered, drawn)


@pytest.mark.parametrize("inner", [128, 2048])
@pytest.mark.parametrize("behind", hostile.BEHIND)
@pytest.mark.parametrize("sizes", hostile.SIZES, ids=str)
def test_rows_behind_the_last_end_are_nobodys(sizes, behind, inner, record_error):
    """Whatever stands there, the others' bits are those of the call without them: in one kernel, or in a product and a
    cast, which leaves them out where they are many."""
    used = sum(sizes)
    a, b = activations(used, 256), weights(len(sizes), 2 * inner, 256)
    ends, order = hostile.ends_of(sizes), torch.randperm(used, device="cuda", dtype=torch.int32)
    more, numbers = tuple(hostile.with_nan_behind(x, behind) for x in a), hostile.with_no_rows_behind(order, behind)
    for op, operand in ((dsa.grouped_fp8_gemm_swiglu, dsa.widen_fp4(*b[:2])), (dsa.grouped_fp8_fp4_gemm_swiglu, b)):
        for limit in (None, 1.5):
            expected = op(a, operand, ends, limit=limit), op(a, operand, ends, rows=order, limit=limit)
            poison_free_memory(mebibytes=64)
            got = op(more, operand, ends, limit=limit), op(a, operand, ends, rows=numbers, limit=limit)
            for mine, right in zip(got, expected, strict=True):
                assert len(mine[0]) == len(mine[1]) == used + behind
                same(tuple(x[:used] for x in mine), right, record_error)


@pytest.mark.parametrize("fp4", [False, True])
@pytest.mark.parametrize("behind", [0, 5000])
@pytest.mark.parametrize("sizes", [[3, 0, 40, 1], [70, 0, 1300, 9]], ids=str)
def test_expected_rows_change_no_bit(sizes, behind, fp4, record_error):
    """From far too few to all rows: one kernel or two, with rows gathered or copied, tiles drawn or not."""
    used, count = sum(sizes), sum(sizes) + behind
    a, b = activations(used, 256), weights(len(sizes), 256, 256)
    op, operand = (dsa.grouped_fp8_fp4_gemm_swiglu, b) if fp4 else (dsa.grouped_fp8_gemm_swiglu, dsa.widen_fp4(*b[:2]))
    ends, order = hostile.ends_of(sizes), torch.randperm(used, device="cuda", dtype=torch.int32)
    more, numbers = tuple(hostile.with_nan_behind(x, behind) for x in a), hostile.with_no_rows_behind(order, behind)
    expected = op(a, operand, ends), op(a, operand, ends, rows=order)
    for number in {0, 1, 64, 65, 96, 97, used, 1024, 4096, 4097, count}:
        if number <= count:
            poison_free_memory(mebibytes=16)
            options = {"expected_rows": number}
            got = op(more, operand, ends, **options), op(a, operand, ends, rows=numbers, **options)
            for mine, right in zip(got, expected, strict=True):
                same(tuple(x[:used] for x in mine), right, record_error)


@pytest.mark.parametrize("fp4", [False, True])
def test_a_share_of_the_experts(fp4):
    """What a process computes that holds experts 5 to 9 of 16, for its tokens' entries: the bits of one that holds all.
    The others' rows, of which nothing is written, reach no token."""
    tokens, k, experts = 300, 4, 16
    x = torch.randn(tokens, 256, device="cuda").bfloat16()
    chosen = torch.rand(tokens, experts, device="cuda").argsort(-1)[:, :k]
    first, second = weights(experts, 512, 256), weights(experts, 256, 256)
    if not fp4:
        first, second = (dsa.widen_fp4(*weight[:2]) for weight in (first, second))
    swiglu = dsa.grouped_fp8_fp4_gemm_swiglu if fp4 else dsa.grouped_fp8_gemm_swiglu
    product = dsa.grouped_fp8_fp4_gemm_nt if fp4 else dsa.grouped_fp8_gemm_nt

    def outputs(begin, end):
        share = slice(begin, end)
        _, rows, ends = dsa.sort_by_expert(chosen - begin, end - begin)
        poison_free_memory(mebibytes=64)
        h = swiglu(dsa.scatter_cast_to_fp8(x, rows), tuple(w[share] for w in first), ends)
        y = product(h, tuple(w[share] for w in second), ends)
        return y, rows, dsa.combine_experts(y, rows)

    whole, every, _ = outputs(0, experts)
    y, rows, combined = outputs(5, 10)
    own = (chosen >= 5) & (chosen < 10)
    assert torch.equal(rows >= 0, own) and own.any() and not own.all()
    assert torch.equal(y[rows[own].long()], whole[every[own].long()])
    assert torch.equal(combined, dsa.combine_experts(whole, every.masked_fill(~own, -1)))
    assert not combined.isnan().any()


def test_rows_as_they_are():
    a, b = activations(90, 256), weights(4, 512, 256)
    ends = torch.tensor([10, 70, 70, 90], dtype=torch.int32, device="cuda")
    every = torch.arange(90, dtype=torch.int32, device="cuda")
    for op, operand in ((dsa.grouped_fp8_gemm_swiglu, dsa.widen_fp4(*b[:2])), (dsa.grouped_fp8_fp4_gemm_swiglu, b)):
        same(op(a, operand, ends), op(a, operand, ends, rows=every))
        same(op(a, operand, ends, limit=2), op(a, operand, ends, limit=2.0))
        none = torch.zeros(4, dtype=torch.int32, device="cuda")
        assert op(tuple(x[:0] for x in a), operand, none)[0].shape == (0, 256)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 37, 700, 1400])
def test_rows_and_weights_of_products(tokens, out_dtype, record_error):
    (q, s), b = activations(tokens, 512), weights(8, 392, 512)
    wide = dsa.widen_fp4(*b[:2])
    rows, ends = routed(tokens, 8, 3)
    copied = q.view(torch.uint8)[rows].view(q.dtype), s[rows]
    factors = torch.rand(len(rows), device="cuda")
    plain = dsa.grouped_fp8_gemm_nt(copied, wide, ends, torch.float32)
    poison_free_memory(mebibytes=64)
    got = dsa.grouped_fp8_gemm_nt((q, s), wide, ends, out_dtype, rows=rows)
    same([got], [plain.to(out_dtype)], record_error)
    got = dsa.grouped_fp8_gemm_nt((q, s), wide, ends, out_dtype, rows=rows, weights=factors)
    same([got], [(plain * factors[:, None]).to(out_dtype)], record_error)
    got = dsa.grouped_fp8_gemm_nt(copied, wide, ends, out_dtype, weights=factors)
    same([got], [(plain * factors[:, None]).to(out_dtype)])


def test_graph_replay_with_new_rows():
    a, b = activations(64, 256), weights(8, 512, 256)
    rows, ends = routed(64, 8, 2)
    dsa.grouped_fp8_fp4_gemm_swiglu(a, b, ends, rows=rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dsa.grouped_fp8_fp4_gemm_swiglu(a, b, ends, rows=rows)
    for _ in range(3):
        other_rows, other_ends = routed(64, 8, 2)
        rows.copy_(other_rows), ends.copy_(other_ends)
        graph.replay()
        same(out, dsa.grouped_fp8_gemm_swiglu(a, dsa.widen_fp4(*b[:2]), ends, rows=rows))


@pytest.mark.parametrize(("fp4", "count", "inner"), [(False, 300, 128), (False, 2000, 128), (True, 2000, 2048)])
def test_graph_replay_with_fewer_rows(fp4, count, inner):
    """Rows that are nobody's in a replay keep what they had, of the kernel with SwiGLU and of a product with a cast."""
    a, b = activations(count, 256), weights(4, 2 * inner, 256)
    wide = dsa.widen_fp4(*b[:2])
    op, operand = (dsa.grouped_fp8_fp4_gemm_swiglu, b) if fp4 else (dsa.grouped_fp8_gemm_swiglu, wide)
    ends = torch.full((4,), count, dtype=torch.int32, device="cuda")
    op(a, operand, ends)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(a, operand, ends)
    for sizes in ([0, 0, 0, 0], [0, 1, 0, 0], [7, 0, count // 2, 5], [0, 0, 0, count]):
        ends.copy_(hostile.ends_of(sizes))
        out[0].view(torch.uint8).fill_(7), out[1].fill_(7.0)
        graph.replay()
        used = sum(sizes)
        gate_up = dsa.grouped_fp8_gemm_nt(tuple(x[:used] for x in a), wide, ends)
        same(tuple(x[:used] for x in out), dsa.swiglu_cast_to_fp8(*gate_up.chunk(2, -1)))
        # A graph that widens FP4 weights has them in its memory before the results, and maybe at the same place.
        if not fp4:
            assert out[0].view(torch.uint8)[used:].eq(7).all() and out[1][used:].eq(7).all(), sizes


def test_graph_replay_of_drawn_tiles():
    """The graph zeroes the counter of each replay."""
    a, b = activations(2000, 256), dsa.widen_fp4(*weights(8, 512, 256)[:2])
    ends = torch.full((8,), 2000, dtype=torch.int32, device="cuda")
    dsa.grouped_fp8_gemm_swiglu(a, b, ends)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dsa.grouped_fp8_gemm_swiglu(a, b, ends)
    for seed in (0, 0, 1):
        cuts = torch.randint(0, 2001, (7,), generator=torch.Generator().manual_seed(seed)).sort().values
        ends.copy_(torch.cat((cuts, torch.tensor([2000]))))
        out[0].view(torch.uint8).fill_(255), out[1].fill_(torch.nan)
        graph.replay()
        same(out, launched(kernels.SWIGLU_CONFIGS[0], a, b, ends, (torch.bfloat16, True, None)))
