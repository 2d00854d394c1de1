"""The rotation with shapes, strides, outputs and numbers that its cases leave out, and its gradients."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import assert_equal

NEW, INTO = cases_of("rotary")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
KINDS = [{"interleaved": interleaved, "dims": dims} for interleaved in (True, False) for dims in ("first", "last")]
by_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SHAPES = [(1, 64), (7, 128), (7, 1, 64), (7, 64, 512), (1, 128, 64), (33, 5, 192), (9, 2, 4, 72)]
LENGTHS = [(8, 8), (16, 8), (64, 48), (2, 2), (10, 6), (64, 62), (26, 16), (512, 512)]  # channels, rotated
LONG = [(1, 512), (64, 128), (64, 512), (128, 64)]  # more than 2^24 numbers give a thread two units


def inputs(shape, **sizes):
    """(x, cos, sin)"""
    return [*NEW.arguments("cuda", shape=shape, **sizes).values()][:3]


@by_kind
@pytest.mark.parametrize(
    ("shape", "rotated", "dtype"),
    [
        *((shape, 64, dtype) for shape in SHAPES for dtype in DTYPES),
        *(((37, 3, dim), rotated, dtype) for dim, rotated in LENGTHS for dtype in DTYPES),
        *(((4096, *heads), 64, torch.bfloat16) for heads in LONG),
    ],
    ids=str,
)
def test_shapes(shape, rotated, dtype, kind, record_error):
    poison_free_memory(mebibytes=64)
    record_error(NEW.verify("cuda", shape=shape, rotated=rotated, dtype=dtype, **kind))


@by_kind
@by_dtype
def test_parts_of_wider_tensors(dtype, kind, record_error):
    """Rows at multiples of 16 bytes and others, heads and tokens in any order, and a stride of 0."""
    given = NEW.arguments("cuda", shape=(50, 8, 576), dtype=dtype, **kind)
    base, row = given["x"], given["x"][:, 0]
    for x in [
        *(base[..., 512:], base[..., 128:256], base[..., 3:131], base[::1, ::2, 8:136], base[:, 3:4, :64]),
        *(base.transpose(0, 1).contiguous().transpose(0, 1)[..., :512], base[:, :1].expand(50, 8, 576), row[:, 512:]),
        *(row[:, 1:65], base.flatten(1)[:, 8:136]),
    ]:
        poison_free_memory(mebibytes=64)
        record_error(NEW.check_call(given | {"x": x}))


@by_kind
@by_dtype
@pytest.mark.parametrize("begin", [512, 0, 509])
def test_out_in_a_wider_tensor(begin, dtype, kind):
    wide = torch.full((50, 8, 576), torch.nan, device="cuda", dtype=dtype)
    out = wide[..., begin : begin + 64]
    given = INTO.arguments("cuda", shape=(50, 8, 64), rotated=48, dtype=dtype, **kind) | {"out": out}
    INTO.check_call(given)
    assert dsa.apply_rotary(**given) is out
    assert wide[..., :begin].isnan().all() and wide[..., begin + 64 :].isnan().all()


@by_kind
@by_dtype
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
    given = INTO.arguments("cuda", shape=shape, rotated=rotated, dtype=dtype, out="x", **kind)
    base, x = given["x"], given["x"][..., begin : begin + dim]
    before = base.clone()
    INTO.check_call(given | {"x": x, "out": x})
    assert torch.equal(base[..., :begin], before[..., :begin])
    assert torch.equal(base[..., begin + dim :], before[..., begin + dim :])


@by_kind
def test_special_values_stay_in_their_pair_or_are_copied(kind):
    x, cos, sin = inputs((60, 4, 96))
    for i, value in enumerate((torch.nan, torch.inf, -torch.inf, -0.0, torch.finfo(torch.bfloat16).max)):
        x[10 * i, 1, 7], x[10 * i + 1, 2, 90], x[10 * i + 2, 3, 40] = value, value, value
    assert_equal(dsa.apply_rotary(x, cos, sin, **kind), dsa.reference.apply_rotary(x, cos, sin, **kind))
    x.nan_to_num_(0.0, 0.0, 0.0)
    x[3, 1, 7] = torch.nan
    wrong = dsa.apply_rotary(x, cos, sin, **kind).isnan()
    rotated = kind["dims"] == "first"  # channel 7 is not among the last 64 of 96
    assert wrong.sum() == wrong[3, 1].sum() == (2 if rotated else 1)


@by_kind
@by_dtype
def test_angles_in_other_layouts(dtype, kind):
    x, cos, sin = inputs((40, 3, 128), dtype=dtype)
    expected = dsa.apply_rotary(x, cos, sin, **kind)
    wide = torch.nn.functional.pad(cos, (3, 2))[:, 3:-2]
    assert torch.equal(dsa.apply_rotary(x, wide, sin.T.contiguous().T, **kind), expected)
    assert torch.equal(dsa.apply_rotary(x, torch.stack((cos, cos), 1)[:, 1], sin, **kind), expected)
    one = dsa.apply_rotary(x, cos[:1].expand_as(cos), sin[:1].expand_as(sin), **kind)
    assert torch.equal(one[:1], expected[:1])


@by_kind
@by_dtype
def test_gradients(dtype, kind):
    x, cos, sin = inputs((33, 4, 128), dtype=dtype)
    grad = torch.randn(x.shape, device="cuda").to(dtype)
    x.requires_grad_()
    (expected,) = torch.autograd.grad(dsa.reference.apply_rotary(x, cos, sin, **kind), x, grad)
    (got,) = torch.autograd.grad(dsa.apply_rotary(x, cos, sin, **kind), x, grad)
    assert torch.equal(got, expected)
    dsa.apply_rotary(x, cos, sin, **kind).sum().backward()  # of a gradient without memory of its own
    with pytest.raises(ValueError, match="out: must be None where gradients"):
        dsa.apply_rotary(x, cos, sin, **kind, out=torch.empty_like(x))


def test_offsets_beyond_32_bits():
    tokens = 2**31 // (128 * 512) + 50
    x = torch.zeros(tokens, 128, 512, dtype=torch.bfloat16, device="cuda")
    some, cos, sin = inputs((100, 128, 512))
    x[-100:] = some
    angles = [torch.cat((a.new_zeros(tokens - 100, 32), a)) for a in (cos, sin)]
    got = dsa.apply_rotary(x, *angles, interleaved=True, dims="last")
    assert torch.equal(got[-100:], dsa.apply_rotary(some, cos, sin, interleaved=True, dims="last"))
    assert not got[:-100].any()
