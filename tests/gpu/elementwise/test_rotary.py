"""apply_rotary and its gradients on the GPU: every kernel, strides, outputs inside larger tensors, and non-finite
numbers."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from tests.gpu.case_checks import FLOATS, by_dtype, by_sizes, check_far_rows, check_layouts, grid, verify
from tests.gpu.op_checks import assert_equal

NEW, INTO = cases_of("rotary")
by_kind = pytest.mark.parametrize(
    "kind", grid(interleaved=(True, False), dims=("first", "last")), ids=lambda kind: "-".join(map(str, kind.values()))
)


@by_kind
@by_sizes(
    grid(shape=[(1, 64), (7, 128), (7, 1, 64), (7, 64, 512), (1, 128, 64), (33, 5, 192), (9, 2, 4, 72)], dtype=FLOATS),
    *(
        grid(shape=[(37, 3, channels)], rotated=[rotated], dtype=FLOATS)
        for channels, rotated in [(8, 8), (16, 8), (64, 48), (2, 2), (10, 6), (64, 62), (26, 16), (512, 512)]
    ),
    # These tensors are bf16. The last three have more than 2^24 numbers, so each thread processes two groups of pairs.
    grid(shape=[(4096, *heads) for heads in [(1, 512), (64, 128), (64, 512), (128, 64)]]),
)
def test_every_shape_is_right(sizes, kind, record_error):
    verify(NEW, sizes | kind, record_error)


@by_kind
@by_dtype
@pytest.mark.parametrize("shape", [(50, 64), (50, 8, 512), (50, 1, 576)])
def test_layouts_change_no_bit(shape, dtype, kind):
    check_layouts(NEW, ("x", "cos", "sin"), shape=shape, dtype=dtype, **kind)


@by_kind
@by_dtype
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("shape", "begin", "dim", "rotated"),
    [
        *(((50, 8, 576), begin, 64, 48) for begin in (512, 0, 509)),
        *(((300, 64, 512), 0, 512, 64), ((300, 16, 576), 512, 64, 64)),
        *(((70, 3, 61), 1, 59, 30), ((4200, 64, 72), 0, 72, 64)),
    ],
)
def test_only_the_channels_of_out_are_written(shape, begin, dim, rotated, in_place, dtype, kind):
    if dim % 2 and not in_place:
        pytest.skip("an odd number of channels can only be rotated in place")
    given = INTO.arguments("cuda", shape=shape, rotated=rotated, dtype=dtype, out="x" if in_place else "new", **kind)
    whole, inside = given["out"], slice(begin, begin + dim)
    expected, out = whole.clone(), whole[..., inside]
    given |= {"x": out if in_place else given["x"][..., inside].contiguous(), "out": out}
    INTO.check_call(given)
    expected[..., inside] = out
    assert torch.equal(whole, expected)
    assert dsa.apply_rotary(**given) is out


@by_kind
def test_special_values_stay_in_their_pair_or_are_copied(kind):
    given = NEW.arguments("cuda", shape=(60, 4, 96), **kind)
    x, _ = given["x"], given.pop("out")
    for i, value in enumerate((torch.nan, torch.inf, -torch.inf, -0.0, torch.finfo(torch.bfloat16).max)):
        x[10 * i, 1, 7], x[10 * i + 1, 2, 90], x[10 * i + 2, 3, 40] = value, value, value
    assert_equal(dsa.apply_rotary(**given), dsa.reference.apply_rotary(**given))
    x.nan_to_num_(0.0, 0.0, 0.0)
    x[3, 1, 7] = torch.nan
    wrong = dsa.apply_rotary(**given).isnan()
    rotated = kind["dims"] == "first"  # channel 7 is not among the last 64 of 96 channels
    assert wrong.sum() == wrong[3, 1].sum() == (2 if rotated else 1)


@by_kind
@by_dtype
def test_gradients_are_those_of_the_reference(dtype, kind):
    given = NEW.arguments("cuda", shape=(33, 4, 128), dtype=dtype, **kind)
    x, _ = given["x"].requires_grad_(), given.pop("out")
    grad = torch.randn(x.shape, device="cuda").to(dtype)
    (got,), (expected,) = (torch.autograd.grad(f.apply_rotary(**given), x, grad) for f in (dsa, dsa.reference))
    assert torch.equal(got, expected)
    dsa.apply_rotary(**given).sum().backward()  # the upstream gradient has strides of 0
    with pytest.raises(ValueError, match="out: must be None where gradients"):
        dsa.apply_rotary(**given | {"out": torch.empty_like(x)})


def test_offsets_beyond_32_bits():
    given = NEW.arguments("cuda", shape=(100, 128, 512), dims="last")
    check_far_rows(NEW, given, ("x", "cos", "sin"), 2**31 // (128 * 512) + 50)
