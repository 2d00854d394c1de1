"""The rotation kernel on the GPU against the reference on the CPU: bit for bit."""

import pytest
import torch

import dsa
from dsa.reference.elementwise import rotary as reference
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import (
    assert_runs_have_the_same_bits,
    assert_same_on_the_second_gpu,
    on_a_late_stream,
    replays,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
KINDS = [(True, "first"), (True, "last"), (False, "first"), (False, "last")]
NAN = torch.nan
SHAPES = [(1, 64), (7, 128), (7, 1, 64), (7, 64, 512), (1, 128, 64), (33, 5, 192), (9, 2, 4, 72)]
LENGTHS = [(8, 8), (16, 8), (64, 48), (2, 2), (10, 6), (64, 62), (26, 16), (512, 512)]  # channels, rotated
LONG = [(1, 512), (64, 128), (64, 512), (128, 64)]  # beyond 2^24 numbers a thread has two units


def inputs(shape, rotated=64, dtype=torch.bfloat16):
    angles = 100 * torch.randn(shape[0], rotated // 2, device="cuda")
    return torch.randn(shape, device="cuda").to(dtype), angles.cos(), angles.sin()


def expected_of(x, cos, sin, kind):
    return reference.apply_rotary(x.cpu(), cos.cpu(), sin.cpu(), interleaved=kind[0], dims=kind[1])


def rotate(x, cos, sin, kind, **more):
    return dsa.apply_rotary(x, cos, sin, interleaved=kind[0], dims=kind[1], **more)


def check(x, cos, sin, kind, record_error=None):
    expected = expected_of(x, cos, sin, kind)
    poison_free_memory(mebibytes=64)
    got = rotate(x, cos, sin, kind)
    assert got.is_contiguous() and got.dtype == x.dtype and got.device == x.device
    if record_error and expected.numel():
        record_error((got.cpu().double() - expected.double()).abs().nan_to_num().max())
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    ("shape", "rotated", "dtype"),
    [
        *((shape, 64, dtype) for shape in SHAPES for dtype in DTYPES),
        *(((37, 3, dim), rotated, dtype) for dim, rotated in LENGTHS for dtype in DTYPES),
        *(((4096, *heads), 64, torch.bfloat16) for heads in LONG),
    ],
    ids=str,
)
def test_bits(shape, rotated, dtype, kind, record_error):
    check(*inputs(shape, rotated, dtype), kind, record_error)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_of_wider_tensors(dtype, kind, record_error):
    """At multiples of 16 bytes and not, heads and tokens in any order, and without a stride."""
    base, cos, sin = inputs((50, 8, 576), 64, dtype)
    row = base[:, 0]
    for x in [
        *(base[..., 512:], base[..., 128:256], base[..., 3:131], base[::1, ::2, 8:136], base[:, 3:4, :64]),
        *(base.transpose(0, 1).contiguous().transpose(0, 1)[..., :512], base[:, :1].expand(50, 8, 576), row[:, 512:]),
        *(row[:, 1:65], base.flatten(1)[:, 8:136]),
    ]:
        check(x, cos, sin, kind, record_error)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("begin", [512, 0, 509])
def test_out_in_a_wider_tensor(begin, dtype, kind):
    x, cos, sin = inputs((50, 8, 64), 48, dtype)
    wide = torch.full((50, 8, 576), NAN, device="cuda", dtype=dtype)
    out = wide[..., begin : begin + 64]
    assert rotate(x, cos, sin, kind, out=out) is out
    assert torch.equal(out.cpu(), expected_of(x, cos, sin, kind))
    assert wide[..., :begin].isnan().all() and wide[..., begin + 64 :].isnan().all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "begin", "dim", "rotated"),
    [
        ((300, 64, 512), 0, 512, 64),
        ((300, 16, 576), 512, 64, 64),
        ((70, 3, 61), 1, 59, 30),
        ((4200, 64, 72), 0, 72, 64),
    ],
)
def test_in_place(shape, begin, dim, rotated, dtype, kind):
    base, cos, sin = inputs(shape, rotated, dtype)
    x = base[..., begin : begin + dim]
    expected = base.cpu()
    expected[..., begin : begin + dim] = expected_of(x, cos, sin, kind)
    assert rotate(x, cos, sin, kind, out=x) is x
    assert torch.equal(base.cpu(), expected)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_special_values_stay_in_their_pair_and_elsewhere_pass(kind):
    x, cos, sin = inputs((60, 4, 96))
    for i, value in enumerate((NAN, torch.inf, -torch.inf, -0.0, torch.finfo(torch.bfloat16).max)):
        x[10 * i, 1, 7], x[10 * i + 1, 2, 90], x[10 * i + 2, 3, 40] = value, value, value
    check(x, cos, sin, kind)
    x.nan_to_num_(0.0, 0.0, 0.0)
    x[3, 1, 7] = NAN
    wrong = rotate(x, cos, sin, kind).isnan()
    assert wrong.sum() == wrong[3, 1].sum() == (1 if kind[1] == "last" else 2)  # 7 is not among the last 64 of 96


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_angles_in_other_layouts(dtype):
    x, cos, sin = inputs((40, 3, 128), 64, dtype)
    for kind in KINDS:
        expected = rotate(x, cos, sin, kind)
        wide = torch.nn.functional.pad(cos, (3, 2))[:, 3:-2]
        assert torch.equal(rotate(x, wide, sin.T.contiguous().T, kind), expected)
        assert torch.equal(rotate(x, torch.stack((cos, cos), 1)[:, 1], sin, kind), expected)
        one = rotate(x, cos[:1].expand_as(cos), sin[:1].expand_as(sin), kind)
        assert torch.equal(one[:1], expected[:1])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_gradients(kind):
    for dtype in DTYPES:
        x, cos, sin = inputs((33, 4, 128), 64, dtype)
        grad = torch.randn(x.shape, device="cuda").to(dtype)
        host = x.cpu().requires_grad_()
        (expected,) = torch.autograd.grad(expected_of(host, cos, sin, kind), host, grad.cpu())
        x.requires_grad_()
        (got,) = torch.autograd.grad(rotate(x, cos, sin, kind), x, grad)
        assert torch.equal(got.cpu(), expected)
        rotate(x, cos, sin, kind).sum().backward()
        with pytest.raises(ValueError, match="out: must be None where gradients"):
            rotate(x, cos, sin, kind, out=torch.empty_like(x))


def test_offsets_beyond_32_bits():
    tokens = 2**31 // (128 * 512) + 50
    x = torch.zeros(tokens, 128, 512, dtype=torch.bfloat16, device="cuda")
    some, cos, sin = inputs((100, 128, 512))
    x[-100:] = some
    angles = [torch.cat((a.new_zeros(tokens - 100, 32), a)) for a in (cos, sin)]
    got = dsa.apply_rotary(x, *angles, interleaved=True, dims="last")
    assert torch.equal(got[-100:], dsa.apply_rotary(some, cos, sin, interleaved=True, dims="last"))
    assert not got[:-100].any()


def test_twenty_runs_are_identical():
    assert_runs_have_the_same_bits(dsa.apply_rotary, *inputs((1000, 64, 512)), interleaved=False)


@pytest.mark.parametrize("in_place", [False, True])
def test_graph_replay_with_new_data(in_place):
    given = inputs((30, 16, 512))

    def op(x, cos, sin):
        return rotate(x, cos, sin, (True, "last"), out=x if in_place else None)

    made = []

    def renew():
        made.append(inputs((30, 16, 512)))
        return made[-1]

    for got in replays(op, given, renew):
        assert torch.equal(got.cpu(), expected_of(*made[-1], (True, "last")))


def test_side_stream():
    x, cos, sin = inputs((4096, 64, 128))
    got = on_a_late_stream(lambda: x.mul_(2), dsa.apply_rotary, x, cos, sin, interleaved=True)
    assert torch.equal(got.cpu(), expected_of(x, cos, sin, (True, "first")))


@pytest.mark.several_gpus
def test_a_tensor_on_another_gpu_than_the_current_one():
    assert_same_on_the_second_gpu(dsa.apply_rotary, *inputs((40, 8, 128)), interleaved=True)


def test_torch_compile():
    x, cos, sin = inputs((40, 8, 128))
    function = torch.compile(
        lambda *a, out=None: dsa.apply_rotary(*a, interleaved=True, out=out), fullgraph=True, backend="aot_eager"
    )
    expected = dsa.apply_rotary(x, cos, sin, interleaved=True)
    assert torch.equal(function(x, cos, sin), expected)
    function(x, cos, sin, out=x)
    assert torch.equal(x, expected)
