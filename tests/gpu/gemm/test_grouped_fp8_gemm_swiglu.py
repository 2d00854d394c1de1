"""Experts' first half on the GPU: bit by bit its product, SwiGLU and cast; and rows and weights of the products."""

from functools import partial

import pytest
import torch

import dsa
from dsa.kernels.gemm import fp8_gemm_sm90 as kernels
from dsa.ops._kernel_arguments import dtype_name
from dsa.ops.gemm import fp8_gemm_nt as bridge
from dsa.testing import poison_free_memory
from tests.gpu.gemm import hostile
from tests.gpu.gemm.test_fp8_fp4_gemm_nt import activations, weights
from tests.gpu.op_checks import assert_same_bits, replays

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Rows of matrices: full and all but empty last tiles of either height, and warps with one row.
TAILS = [1, 15, 16, 17, 31, 32, 33, 63, 64, 0, 65, 127, 128, 129, 191, 193, 0, 257]


def routed(tokens, experts, k):
    """(rows, ends) of tokens that go to k experts each."""
    chosen = torch.rand(tokens, experts, device="cuda").argsort(-1)[:, :k]
    order, _, ends = dsa.sort_by_expert(chosen, experts)
    return order // k, ends


def same(got, expected, record_error=None):
    assert all(x.is_contiguous() for x in got)
    assert_same_bits(got, expected)
    if record_error:
        record_error(0.0)


def product_and_cast(a, b, ends, dtype=torch.bfloat16, rows=None, use_ue8m0=True, limit=None):
    gate_up = dsa.grouped_fp8_gemm_nt(a, b, ends, dtype, rows=rows)
    return dsa.swiglu_cast_to_fp8(*gate_up.chunk(2, -1), use_ue8m0, limit=limit)


@pytest.mark.parametrize("use_ue8m0", [False, True])
@pytest.mark.parametrize("limit", [None, 1.5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "inner", "channels"), [(1, 128, 128), (37, 384, 1024), (700, 2048, 512), (1400, 128, 256)]
)
def test_is_what_it_is_made_of(tokens, inner, channels, dtype, limit, use_ue8m0, record_error):
    """Also where rows are more than a kernel gathers."""
    a, b = activations(tokens, channels), weights(8, 2 * inner, channels)
    rows, ends = routed(tokens, 8, 3)
    options = {"rows": rows, "limit": limit, "use_ue8m0": use_ue8m0, "dtype": dtype}
    wide = dsa.widen_fp4(*b[:2])
    expected = product_and_cast(a, wide, ends, **options)
    for op, operand in ((dsa.grouped_fp8_gemm_swiglu, wide), (dsa.grouped_fp8_fp4_gemm_swiglu, b)):
        poison_free_memory(mebibytes=64)
        same(op(a, operand, ends, **options), expected, record_error)


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


def launched(config, a, b, ends, q, scale, variant=(torch.bfloat16, True, None), rows=None, drawn=False, ctas=None):
    """Write q and scale by the kernel with work tiles of `config`; variant: (dtype, use_ue8m0, limit)."""
    (x, s), (w, ws), (dtype, use_ue8m0, limit) = a, b, variant
    kind = use_ue8m0, limit is not None, config, rows is not None, drawn
    counter = torch.zeros(1, dtype=torch.int32, device="cuda") if drawn else None
    scales = bridge.aligned_scales(s), bridge.aligned_scales(ws).permute(1, 2, 0)
    kernels.compile_fp8_gemm_swiglu(dtype_name(dtype), *kind)(
        *(x, scales[0], rows, w.view(-1, w.shape[-1]), scales[1], ends),
        *(q, scale, limit, counter, dsa.num_sms(q.device) if ctas is None else ctas),
    )


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
    ends = hostile.ends_of(TAILS)
    expected = product_and_cast(a, b, ends, dtype, use_ue8m0=use_ue8m0, limit=limit)
    order = torch.randperm(len(a[0]), device="cuda")
    mixed = tuple(torch.empty_like(x.view(torch.uint8)).index_copy_(0, order, x.view(torch.uint8)) for x in a)
    mixed = tuple(x.view(own.dtype) for x, own in zip(mixed, a, strict=True))
    for config, gathered, drawn in KINDS:
        operand, rows = (mixed, order.int()) if gathered else (a, None)
        write = partial(launched, config, operand, b, ends, variant=variant, rows=rows, drawn=drawn)
        for ctas in (None, 3) if drawn else (None,):
            hostile.check_written(partial(write, ctas=ctas), *expected)


@pytest.mark.parametrize(
    ("ends", "rows_of", "count"), hostile.rows_of_matrices(TAILS, [*TAILS[::-1], 0]), ids=hostile.name
)
def test_only_the_rows_of_matrices_are_written(ends, rows_of, count):
    """By every tile, whatever the ends say; and what stands in other rows does not reach these."""
    a, b = activations(count, 256), dsa.widen_fp4(*weights(len(ends), 256, 256)[:2])
    expected = hostile.untouched(count, 128, a[0].dtype), hostile.untouched(count, 1, torch.float32)
    ends = torch.tensor(ends, dtype=torch.int32, device="cuda")

    def product(own, matrix):
        return dsa.swiglu_cast_to_fp8(*dsa.fp8_gemm_nt(own, matrix).chunk(2, -1))

    hostile.write_products(product, a, b, rows_of, *expected)
    a, numbers, _ = hostile.with_nobodys_rows(a, rows_of)
    for config, gathered, drawn in KINDS:
        rows = numbers if gathered else None
        hostile.check_written(partial(launched, config, a, b, ends, rows=rows, drawn=drawn), *expected)


@pytest.mark.parametrize("limit", [None, 1.5])
@pytest.mark.parametrize("fp4", [False, True])
@pytest.mark.parametrize("inner", [128, 2048])
@pytest.mark.parametrize("behind", [0, *hostile.BEHIND])
@pytest.mark.parametrize("sizes", [*hostile.SIZES, [70, 0, 1300, 9]], ids=str)
def test_expected_rows_and_rows_behind_change_no_bit(sizes, behind, inner, fp4, limit):
    """In one kernel, or in a product and a cast, which leaves nobody's rows out where they are many; with rows gathered
    or copied, tiles drawn or not."""
    a, b = activations(sum(sizes), 256), weights(len(sizes), 2 * inner, 256)
    op, operand = (dsa.grouped_fp8_fp4_gemm_swiglu, b) if fp4 else (dsa.grouped_fp8_gemm_swiglu, dsa.widen_fp4(*b[:2]))
    hostile.check_expected_rows(op, a, operand, sizes, behind, weighted=False, limit=limit)


def test_graph_replay_with_new_rows():
    a, b = activations(64, 256), weights(8, 512, 256)
    wide = dsa.widen_fp4(*b[:2])

    def op(rows, ends):
        return dsa.grouped_fp8_fp4_gemm_swiglu(a, b, ends, rows=rows)

    given = rows, ends = routed(64, 8, 2)
    for out in replays(op, given, partial(routed, 64, 8, 2)):
        same(out, dsa.grouped_fp8_gemm_swiglu(a, wide, ends, rows=rows))


@pytest.mark.parametrize(("fp4", "count", "inner"), [(False, 300, 128), (False, 2000, 128), (True, 2000, 2048)])
def test_graph_replay_with_fewer_rows(fp4, count, inner):
    """Of the kernel with SwiGLU, of drawn tiles, whose counter each replay zeroes, and of a product with a cast."""
    a, b = activations(count, 256), weights(4, 2 * inner, 256)
    wide = dsa.widen_fp4(*b[:2])
    op, operand = (dsa.grouped_fp8_fp4_gemm_swiglu, b) if fp4 else (dsa.grouped_fp8_gemm_swiglu, wide)

    def expected_of(own, sizes):
        return product_and_cast(own, wide, hostile.ends_of(sizes))

    # A graph that widens FP4 weights has them in its memory before the results, and maybe at the same place.
    hostile.check_replays_with_fewer_rows(op, a, operand, expected_of, nobodys_are_kept=not fp4)
