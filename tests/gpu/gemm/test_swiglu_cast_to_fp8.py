"""SwiGLU and cast on the GPU: the bits of the cast for an h within 2^-20 of the exact one."""

import math
from itertools import product

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.gemm import bits
from dsa.kernels.gemm import swiglu_cast_sm90 as kernels
from dsa.ops._kernel_arguments import dtype_name
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import assert_same_bits

(CASE,) = cases_of("swiglu_cast_to_fp8")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NAN, INF = math.nan, math.inf
by_scale = pytest.mark.parametrize("use_ue8m0", [True, False])


def check(gate, up, use_ue8m0=True, limit=None):
    given = {"gate": gate, "up": up, "use_ue8m0": use_ue8m0, "limit": limit}
    poison_free_memory(mebibytes=64)
    return CASE.check(given, CASE.run(given))


@pytest.mark.parametrize("limit", [None, 7.0])
@by_scale
@pytest.mark.parametrize(
    "shape",
    [*product((1, 7, 1024), (128, 200, 2048)), *((33, channels) for channels in (8, 16, 72, 120, 136, 248, 1000))],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_variants(dtype, shape, use_ue8m0, limit, record_error):
    options = {"dtype": dtype, "use_ue8m0": use_ue8m0, "limit": limit, "halves": False}
    poison_free_memory(mebibytes=64)
    record_error(CASE.verify("cuda", shape=shape, **options))


@pytest.mark.parametrize(
    ("shape", "limit"), [((32768, 2048), None), ((32768, 2048), 10.0), ((32768, 200), None), ((4096, 18432), None)]
)
@by_scale
def test_large(shape, limit, use_ue8m0, record_error):
    record_error(CASE.verify("cuda", shape=shape, use_ue8m0=use_ue8m0, limit=limit))


def test_the_whole_range_of_gates():
    """Every finite bf16 gate, with up 1 and with up -0.3."""
    gate = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(torch.bfloat16).view(-1, 128)
    finite = torch.where(gate.isfinite(), gate, 0)
    for limit in (None, 1.5):
        check(finite, torch.ones_like(finite), False, limit)
        check(finite.float(), torch.full_like(finite, -0.3).float(), True, limit)


@by_scale
@pytest.mark.parametrize("limit", [None, 2.0])
@pytest.mark.parametrize("channels", [512, 520])
def test_special_values(use_ue8m0, limit, channels):
    given = CASE.arguments("cuda", shape=(12, channels), use_ue8m0=use_ue8m0, limit=limit)
    gate, up = given["gate"], given["up"]
    gate[1], up[2], gate[3] = 0.0, -0.0, -0.0
    gate[4, 5], up[5, 200], gate[6, 7], gate[7, 130], up[8, 500], up[9, 1] = NAN, NAN, INF, -INF, INF, -INF
    gate[10], up[10], gate[11], up[11] = -200.0, 3.0, torch.finfo(torch.bfloat16).tiny / 4, 1.0
    q, scale = (x.cpu() for x in CASE.run(given))
    on_cpu = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    expected_q, expected_scale = dsa.reference.swiglu_cast_to_fp8(**on_cpu)
    special = ~expected_scale.isfinite()
    assert torch.equal(bits(scale)[special], bits(expected_scale)[special])
    assert torch.equal(scale.isfinite(), ~special) and torch.equal(q.float().isnan(), expected_q.float().isnan())
    check(gate.nan_to_num(1.0, 2.0, -2.0), up.nan_to_num(1.0, 2.0, -2.0), use_ue8m0, limit)


def test_strides():
    """Columns between others, every third row, leading dimensions, one row for all."""
    base = torch.randn(64, 3 * 512 + 8, device="cuda").bfloat16()
    check(base[:, 512:1024], base[:, 8:520])
    check(base[::3, :200], base[::3, 520:720], False, 1.0)
    check(*torch.randn(6, 4, 768, device="cuda").bfloat16().chunk(2, -1))
    check(*torch.randn(400, device="cuda").chunk(2, -1))
    check(base[:1, :128].expand(9, 128), base[:9, :128])


def test_offsets_beyond_32_bits():
    gate_up = torch.zeros(600_000, 4096, device="cuda", dtype=torch.bfloat16)  # 2.5e9 elements
    gate_up[-3:] = torch.randn(3, 4096, device="cuda").bfloat16()
    q, scale = dsa.swiglu_cast_to_fp8(*gate_up.chunk(2, -1))
    assert_same_bits((q[-3:], scale[-3:]), dsa.swiglu_cast_to_fp8(*gate_up[-3:].clone().chunk(2, -1)))
    assert not q[1000].float().any()


@pytest.mark.parametrize("limit", [None, 7.0])
@by_scale
@pytest.mark.parametrize("channels", [128, 384, 2048])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_before_the_last_end(dtype, channels, use_ue8m0, limit):
    """The cast of grouped products writes no row from the last end on; an end outside ends nothing. By any number of
    CTAs."""
    rows = 700
    options = {"dtype": dtype, "use_ue8m0": use_ue8m0, "limit": limit, "halves": True}
    given = CASE.arguments("cuda", shape=(rows, channels), **options)
    expected = CASE.run(given)
    launch = kernels.compile_swiglu_cast_of_matrices(dtype_name(dtype), use_ue8m0, limit is not None)
    lasts = [(0, 0), (1, 1), (16, 16), (333, 333), (699, 699), (700, 700), (701, 700), (-1, 700)]
    for (last, cast), ctas in product(lasts, (1, 7, 5000)):
        ends = torch.tensor([0, last // 2, last], dtype=torch.int32, device="cuda")
        around = [torch.full((rows + 2, x.shape[1]), 7.0, device="cuda").to(x.dtype) for x in expected]
        launch(given["gate"], given["up"], *(x[1:-1] for x in around), limit, ends, ctas)
        for got, own in zip(around, expected):
            assert torch.equal(bits(got[1 : 1 + cast]), bits(own[:cast])), (last, ctas)
            assert got[:1].float().eq(7).all() and got[1 + cast :].float().eq(7).all(), (last, ctas)
