"""swiglu_cast_to_fp8 and gate_cast_to_fp8 on the GPU. A relative error of up to 2^-20 is allowed in h, for example in
silu(gate) * up. The rounding of h to the dtype of gate and the FP8 cast must be exact."""

from itertools import product

import pytest
import torch

from dsa.cases import cases_of
from dsa.cases.gemm import bits
from dsa.kernels.gemm import swiglu_cast_sm90 as kernels
from dsa.runtime.checks import dtype_name
from tests.gpu.attention import INF, NAN, checked
from tests.gpu.case_checks import by_sizes, check_far_rows, check_layouts, grid, verify

CASE, GATE = cases_of("swiglu_cast_to_fp8")
OPTIONS = {"limit": (None, 7.0), "use_ue8m0": (True, False)}
PADDED = grid(
    shape=[*product((1, 300, 20000), (8, 128, 200, 640, 768, 1024))], use_ue8m0=(True, False), pad_scales=(True,)
)
GATES = {"dtype": (torch.bfloat16, torch.float16, torch.float32), "use_ue8m0": (True, False), "halves": (False,)}
KINDS = {"dtype": (torch.bfloat16, torch.float16, torch.float32), **OPTIONS}


@by_sizes(
    grid(
        shape=[*product((1, 7, 1024), (128, 200, 2048)), *((33, n) for n in (8, 16, 72, 120, 136, 248, 1000))],
        halves=(False,),
        **KINDS,
    ),
    grid(shape=((32768, 2048), (32768, 200), (4096, 18432), (6, 4, 384)), **OPTIONS),
)
def test_every_shape_is_right(sizes, record_error):
    verify(CASE, sizes, record_error)


@pytest.mark.parametrize("limit", [None, 1.5])
def test_every_gate_is_right(limit):
    gate = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(torch.bfloat16).view(-1, 128)
    finite = torch.where(gate.isfinite(), gate, 0)
    for x, factor, use_ue8m0 in ((finite, 1.0, False), (finite.float(), -0.3, True), (finite[200], 1.0, True)):
        checked(CASE, {"gate": x, "up": torch.full_like(x, factor), "use_ue8m0": use_ue8m0, "limit": limit})


@pytest.mark.parametrize("channels", [512, 520])
@by_sizes(grid(limit=(None, 2.0), use_ue8m0=(True, False)))
def test_special_values_are_right(sizes, channels):
    given = CASE.arguments("cuda", shape=(12, channels), **sizes)
    gate, up = given["gate"], given["up"]
    gate[1], up[2], gate[3] = 0.0, -0.0, -0.0
    gate[4, 5], up[5, 200], gate[6, 7], gate[7, 130], up[8, 500], up[9, 1] = NAN, NAN, INF, -INF, INF, -INF
    gate[10], up[10], gate[11], up[11] = -200.0, 3.0, torch.finfo(torch.bfloat16).tiny / 4, 1.0
    checked(CASE, given)


@by_sizes(
    grid(shape=[*product((1, 7, 1024), (128, 200, 2048)), (33, 8), (33, 1000), (32768, 2048), (6, 4, 384)], **GATES)
)
def test_every_gated_shape_is_right(sizes, record_error):
    verify(GATE, sizes, record_error)


@by_sizes(PADDED)
def test_scales_are_padded(sizes, record_error):
    for case in (CASE, GATE):
        verify(case, sizes, record_error)


def test_every_sigmoid_is_right():
    gate = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(torch.bfloat16).view(-1, 128)
    for x, factor, use_ue8m0 in ((gate, 1.0, False), (gate.float(), -0.3, True)):
        checked(GATE, {"gate": x, "x": torch.full_like(x, factor), "use_ue8m0": use_ue8m0})


@pytest.mark.parametrize("shape", [(64, 512), (20, 200), (6, 4, 384)])
def test_layouts_change_no_bit_of_a_gate(shape):
    check_layouts(GATE, ("gate", "x"), shape=shape)


@by_sizes(grid(shape=((64, 512), (20, 200), (6, 4, 384), (9, 128)), limit=(None, 1.0)))
def test_layouts_change_no_bit(sizes):
    check_layouts(CASE, ("gate", "up"), **sizes)


def test_offsets_beyond_32_bits():
    check_far_rows(CASE, CASE.arguments("cuda", shape=(3, 4096)), ("gate", "up"), 600_000)


@pytest.mark.parametrize("channels", [128, 384, 2048])
@by_sizes(grid(halves=(True,), **KINDS))
def test_rows_from_the_last_end_on_are_not_written(sizes, channels):
    """The kernel's variant for grouped GEMMs writes no row from the last end on. If the last end is negative or larger
    than the number of rows, this variant writes all rows."""
    given = CASE.arguments("cuda", shape=(700, channels), **sizes)
    expected, limit = CASE.run(given), given["limit"]
    variant = dtype_name(given["gate"].dtype), given["use_ue8m0"], limit is not None
    launch = kernels.compile_swiglu_cast_of_matrices(*variant)
    lasts = [(0, 0), (1, 1), (16, 16), (333, 333), (699, 699), (700, 700), (701, 700), (-1, 700)]
    for (last, cast), ctas in product(lasts, (1, 7, 5000)):
        ends = torch.tensor([0, last // 2, last], dtype=torch.int32, device="cuda")
        around = [torch.full((702, x.shape[1]), 7.0, device="cuda").to(x.dtype) for x in expected]
        launch(given["gate"], given["up"], *(x[1:-1] for x in around), limit, ends, ctas)
        for got, own in zip(around, expected):
            assert torch.equal(bits(got[1 : 1 + cast]), bits(own[:cast])), (last, ctas)
            assert got[:1].float().eq(7).all() and got[1 + cast :].float().eq(7).all(), (last, ctas)
