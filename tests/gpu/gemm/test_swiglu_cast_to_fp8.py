"""The kernel of SwiGLU with a cast, on the GPU: its bits are the cast's for some h within 2^-20 of the exact one."""

from itertools import product

import pytest
import torch

import dsa
from dsa.kernels.gemm import swiglu_cast_sm90 as kernels
from dsa.ops._kernel_arguments import dtype_name
from dsa.reference.gemm import swiglu_cast_to_fp8 as reference
from dsa.reference.gemm.fp8_cast import per_token_cast_to_fp8
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import (
    among_nan,
    assert_runs_have_the_same_bits,
    assert_same_bits,
    assert_same_on_the_second_gpu,
    on_a_late_stream,
    replays,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NAN, INF = float("nan"), float("inf")
CHUNK = 1 << 24  # elements compared at a time, in fp64


def h_bounds(gate, up, limit):
    """The smallest h that the contract allows, the exact and the largest, rounded to the operands' dtype, as fp32."""
    g, u = gate.double(), up.double()
    if limit is not None:
        # As fp32 has the limit.
        limit = torch.tensor(limit, dtype=torch.float32).item()
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    h = g * torch.sigmoid(g) * u
    h = torch.where(g == -INF, NAN, h)  # -inf * 0
    slack = h.abs() * 2**-20 + 1e-36 * u.abs().clamp_min(1)
    slack = torch.where(h.isfinite(), slack, 0.0)
    return [(h + s).float().to(gate.dtype).float() for s in (-slack, 0.0, slack)]


def scale_of(h, use_ue8m0):
    padded = torch.nn.functional.pad(h, (0, -h.shape[-1] % 128))
    return per_token_cast_to_fp8(padded, use_ue8m0)[1]


def check(gate, up, use_ue8m0=True, limit=None, record_error=None):
    """Scales and values between those of the bounds: equal to both, where the bounds round to the same h."""
    poison_free_memory(mebibytes=64)
    q, scale = dsa.swiglu_cast_to_fp8(gate, up, use_ue8m0, limit=limit)
    channels = gate.shape[-1]
    assert q.dtype == torch.float8_e4m3fn and q.shape == gate.shape and q.is_contiguous()
    assert scale.dtype == torch.float32 and scale.shape == (*gate.shape[:-1], -(-channels // 128))
    step = max(1, CHUNK // channels)
    rows = [x.reshape(-1, x.shape[-1]).split(step) for x in (gate, up, q, scale)]
    for g, u, values, scales in zip(*rows, strict=True):
        low, middle, high = h_bounds(g, u, limit)
        largest, smallest = torch.maximum(low.abs(), high.abs()), torch.minimum(low.abs(), high.abs())
        smallest = torch.where(low.signbit() != high.signbit(), 0.0, smallest)
        limits = scale_of(smallest, use_ue8m0), scale_of(largest, use_ue8m0)
        inside = (scales >= limits[0]) & (scales <= limits[1])
        assert (inside | (scales.isnan() & limits[0].isnan() & limits[1].isnan())).all()
        each = scales.repeat_interleave(128, -1)[:, :channels]
        lower, cast, upper = ((h * (1 / each)).clamp(-448, 448).to(values.dtype).float() for h in (low, middle, high))
        got = values.float()
        inside = (got >= lower) & (got <= upper)
        assert (inside | (got.isnan() & lower.isnan() & upper.isnan())).all()
        if record_error and got.numel():
            record_error((got - cast).abs().nan_to_num().max())


def operands(shape, dtype):
    gate = 4 * torch.randn(shape, device="cuda")
    up = torch.randn(shape, device="cuda") * torch.logspace(-4, 3, shape[-2], device="cuda")[:, None]
    return gate.to(dtype), up.to(dtype)


@pytest.mark.parametrize("limit", [None, 7.0])
@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize(
    ("tokens", "channels"),
    [*product((1, 7, 1024), (128, 200, 2048)), *((33, channels) for channels in (8, 16, 72, 120, 136, 248, 1000))],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_variants(dtype, tokens, channels, use_ue8m0, limit, record_error):
    check(*operands((tokens, channels), dtype), use_ue8m0, limit, record_error)


@pytest.mark.parametrize(
    ("tokens", "channels", "limit"), [(32768, 2048, None), (32768, 2048, 10.0), (32768, 200, None), (4096, 18432, None)]
)
@pytest.mark.parametrize("use_ue8m0", [True, False])
def test_large(tokens, channels, limit, use_ue8m0, record_error):
    gate_up = torch.randn(tokens, 2 * channels, device="cuda", dtype=torch.bfloat16)
    check(*gate_up.chunk(2, -1), use_ue8m0, limit, record_error)


def test_the_whole_range_of_gates():
    """Every bf16 gate, once with up 1, without a difference from PyTorch beyond the contract's."""
    gate = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(torch.bfloat16).view(-1, 128)
    finite = torch.where(gate.isfinite(), gate, 0)
    for limit in (None, 1.5):
        check(finite, torch.ones_like(finite), False, limit)
        check(finite.float(), torch.full_like(finite, -0.3).float(), True, limit)


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("limit", [None, 2.0])
@pytest.mark.parametrize("channels", [512, 520])
def test_special_values(use_ue8m0, limit, channels):
    gate, up = operands((12, channels), torch.bfloat16)
    gate[1], up[2], gate[3] = 0.0, -0.0, -0.0
    gate[4, 5], up[5, 200], gate[6, 7], gate[7, 130], up[8, 500], up[9, 1] = NAN, NAN, INF, -INF, INF, -INF
    gate[10], up[10] = -200.0, 3.0
    gate[11], up[11] = torch.finfo(torch.bfloat16).tiny / 4, 1.0
    q, scale = dsa.swiglu_cast_to_fp8(gate, up, use_ue8m0, limit=limit)
    expected, expected_scale = reference.swiglu_cast_to_fp8(gate.cpu(), up.cpu(), use_ue8m0, limit=limit)
    special = ~expected_scale.isfinite()
    torch.testing.assert_close(scale.cpu()[special], expected_scale[special], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(scale.cpu().isfinite(), ~special)
    assert torch.equal(q.cpu().float().isnan(), expected.float().isnan())
    check(gate.nan_to_num(1.0, 2.0, -2.0), up.nan_to_num(1.0, 2.0, -2.0), use_ue8m0, limit)


def test_strides():
    """Halves of one tensor, columns between others, every third row, leading dimensions."""
    base = torch.randn(64, 3 * 512 + 8, device="cuda").bfloat16()
    check(base[:, 512:1024], base[:, 8:520])
    check(base[::3, :200], base[::3, 520:720], False, 1.0)
    check(*torch.randn(6, 4, 768, device="cuda").bfloat16().chunk(2, -1))
    check(*torch.randn(400, device="cuda").chunk(2, -1))
    check(base[:1, :128].expand(9, 128), base[:9, :128])


def test_neighbours_of_the_halves_do_not_matter():
    gate, up = torch.randn(40, 400, device="cuda").bfloat16().chunk(2, -1)
    assert_same_bits(dsa.swiglu_cast_to_fp8(among_nan(gate), among_nan(up)), dsa.swiglu_cast_to_fp8(gate, up))


def test_offsets_beyond_32_bits():
    gate_up = torch.zeros(600_000, 4096, device="cuda", dtype=torch.bfloat16)  # 2.5e9 elements
    gate_up[-3:] = torch.randn(3, 4096, device="cuda").bfloat16()
    q, scale = dsa.swiglu_cast_to_fp8(*gate_up.chunk(2, -1))
    assert_same_bits((q[-3:], scale[-3:]), dsa.swiglu_cast_to_fp8(*gate_up[-3:].clone().chunk(2, -1)))
    assert not q[1000].float().any()


def test_twenty_runs_are_identical():
    gate, up = torch.randn(1000, 3072, device="cuda").bfloat16().chunk(2, -1)
    assert_runs_have_the_same_bits(dsa.swiglu_cast_to_fp8, gate, up, False)


def test_graph_replay_with_new_data():
    given = torch.randn(300, 1024, device="cuda").bfloat16().chunk(2, -1)
    for got in replays(dsa.swiglu_cast_to_fp8, given, lambda: [torch.randn_like(x) for x in given], limit=7.0):
        assert_same_bits(got, dsa.swiglu_cast_to_fp8(*given, limit=7.0))


@pytest.mark.parametrize("limit", [None, 7.0])
@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("channels", [128, 384, 2048])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_before_the_last_end(dtype, channels, use_ue8m0, limit):
    """As grouped products are cast: nothing is written from there on; an end that there is not ends nothing. By any
    number of CTAs."""
    rows = 700
    gate, up = torch.randn(rows, 2 * channels, device="cuda").to(dtype).chunk(2, -1)
    expected = dsa.swiglu_cast_to_fp8(gate, up, use_ue8m0, limit=limit)
    launch = kernels.compile_swiglu_cast_of_matrices(dtype_name(dtype), use_ue8m0, limit is not None)
    lasts = [(0, 0), (1, 1), (16, 16), (333, 333), (699, 699), (700, 700), (701, 700), (-1, 700)]
    for (last, cast), ctas in product(lasts, (1, 7, 5000)):
        ends = torch.tensor([0, last // 2, last], dtype=torch.int32, device="cuda")
        around = torch.full((rows + 2, channels), 7.0, device="cuda").to(expected[0].dtype)
        around_scale = expected[1].new_full((rows + 2, channels // 128), 7.0)
        launch(gate, up, around[1:-1], around_scale[1:-1], limit, ends, ctas)
        for got, own in zip((around, around_scale), expected):
            assert torch.equal(got[1 : 1 + cast].float(), own[:cast].float()), (last, ctas)
            assert got[:1].float().eq(7).all() and got[1 + cast :].float().eq(7).all(), (last, ctas)


def test_side_stream():
    gate, up = torch.randn(4096, 4096, device="cuda").bfloat16().chunk(2, -1)
    expected = dsa.swiglu_cast_to_fp8(gate, 2 * up.contiguous())
    assert_same_bits(on_a_late_stream(lambda: up.mul_(2), dsa.swiglu_cast_to_fp8, gate, up), expected)


@pytest.mark.several_gpus
def test_tensors_on_another_gpu_than_the_current_one():
    assert_same_on_the_second_gpu(dsa.swiglu_cast_to_fp8, *operands((64, 256), torch.bfloat16))
