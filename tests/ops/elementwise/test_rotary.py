"""`apply_rotary` on a CPU: outputs in wider tensors, gradients, and the rows that the kernel gets."""

import pytest
import torch

import dsa
from dsa import reference
from dsa.cases import cases_of

ROTATE = torch.ops.dsa.apply_rotary
NEW, INTO = cases_of("rotary")
KINDS = [(True, "first"), (True, "last"), (False, "first"), (False, "last")]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def inputs(shape=(5, 3, 24), rotated=16, dtype=torch.bfloat16):
    """Return (x, cos, sin)."""
    return [*NEW.arguments(shape=shape, rotated=rotated, dtype=dtype).values()][:3]


def is_wide(variant):
    """Whether the kernel reads groups of 8 channels. Otherwise it reads groups of 2."""
    *_, config = variant
    return config.pairs > 1


def test_an_out_in_a_wider_tensor_leaves_the_rest_as_it_was():
    wide = torch.zeros(5, 3, 34).bfloat16()
    out = wide[..., 4:-6]
    given = INTO.arguments(shape=(5, 3, 24), rotated=16) | {"out": out}
    INTO.check_call(given)
    assert dsa.apply_rotary(**given) is out and not wide[..., :4].any() and not wide[..., -6:].any()


@pytest.mark.parametrize("way", ["reference", "registered", "compiled"])
@pytest.mark.parametrize(("interleaved", "dims"), KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype, interleaved, dims, way):
    x, cos, sin = inputs(dtype=dtype)
    x.requires_grad_()
    kind = {"interleaved": interleaved, "dims": dims}
    torch._dynamo.reset()
    rotate = {
        "reference": lambda: dsa.apply_rotary(x, cos, sin, **kind),
        "registered": lambda: ROTATE(x, cos, sin, interleaved, dims),
        "compiled": torch.compile(lambda: dsa.apply_rotary(x, cos, sin, **kind), fullgraph=True, backend="aot_eager"),
    }[way]
    grad = torch.randn(x.shape).to(dtype)
    (expected,) = torch.autograd.grad(reference.apply_rotary(x, cos, sin, **kind), x, grad)
    (got,) = torch.autograd.grad(rotate(), x, grad)
    assert torch.equal(got, expected)
    rotate().sum().backward()  # the upstream gradient of a sum has strides of 0


def test_second_gradients():
    x, cos, sin = inputs((2, 8), 8, torch.float32)
    x.requires_grad_()
    (first,) = torch.autograd.grad(ROTATE(x, cos, sin, True, "first").square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    torch.testing.assert_close(first, 2 * x)  # a rotation does not change the sum of squares
    torch.testing.assert_close(second, 8 * x)


def test_gradients_with_a_kernel(launches):
    x, cos, sin = inputs()
    got = dsa.apply_rotary(x.requires_grad_(), cos, sin, interleaved=True)
    assert got.grad_fn is not None and len(launches) == 1
    with torch.no_grad():
        assert dsa.apply_rotary(x, cos, sin, interleaved=True).grad_fn is None and len(launches) == 2
    with pytest.raises(ValueError, match="cos: the gradients of cos and sin are the reference's only"):
        dsa.apply_rotary(x, cos.requires_grad_(), sin, interleaved=True)


def test_gradients_with_an_out_are_an_error():
    x, cos, sin = inputs()
    x.requires_grad_()
    out = torch.zeros(5, 3, 24).bfloat16()
    with pytest.raises(ValueError, match="out: must be None where gradients of x"):
        dsa.apply_rotary(x, cos, sin, interleaved=True, out=out)
    with torch.no_grad():
        assert dsa.apply_rotary(x, cos, sin, interleaved=True, out=out) is out


def test_gradients_of_the_angles_on_the_reference():
    x, cos, sin = inputs(dtype=torch.float32)
    rotated = dsa.apply_rotary(x, cos.requires_grad_(), sin, interleaved=True)
    (grad,) = torch.autograd.grad(rotated.sum(), cos)
    torch.testing.assert_close(grad, x[..., :16].unflatten(-1, (8, 2)).sum((1, 3)))


def test_where_16_bytes_do_not_fit_channels_are_read_one_by_one(launches):
    x, cos, sin = inputs((4, 3, 64), 16)
    out = torch.zeros(4, 3, 65).bfloat16()[..., :-1]
    for case in [
        (x, cos, sin, out),
        (x[..., 1:25], cos, sin, None),
        (x[..., :26], cos, sin, None),
        (x[..., :24], cos[:, :6], sin[:, :6], None),
        (x[:, :, :24].as_strided((4, 3, 24), (192, 63, 1)), cos, sin, None),
    ]:
        *arguments, target = case
        dsa.apply_rotary(*arguments, interleaved=True, dims="last", out=target)
    assert [is_wide(variant) for variant, _ in launches] == [False] * 5
    # The last argument is the number of channel pairs before the rotated channels.
    assert [arguments[-1] for _, arguments in launches] == [24, 4, 5, 6, 4]


@pytest.mark.parametrize(("dims", "first"), [("first", 0), ("last", 8)])
def test_in_place_the_kernel_gets_the_rotated_channels_alone(dims, first, launches):
    x, cos, sin = inputs()
    dsa.apply_rotary(x, cos, sin, interleaved=False, dims=dims, out=x)
    odd, *_ = inputs((5, 3, 23))
    dsa.apply_rotary(odd, cos, sin, interleaved=False, out=odd)
    (variant, (rows, _, _, out, begin)), (odd_variant, _) = launches
    assert rows.shape == out.shape == (5, 3, 16) and begin == 0
    assert is_wide(variant) and not is_wide(odd_variant)
    assert rows.data_ptr() == out.data_ptr() == x[..., first:].data_ptr()


def test_an_odd_number_of_channels_only_in_place(launches):
    """In place, the kernel gets only the rotated channels."""
    x, cos, sin = inputs((5, 3, 23))
    for _ in range(2):
        dsa.apply_rotary(x, cos, sin, interleaved=False, out=x.view(x.shape))
        with pytest.raises(ValueError, match=r"x: the kernel takes an even last dimension, .* \(kernels for sm_90\)"):
            dsa.apply_rotary(x, cos, sin, interleaved=False, out=torch.empty_like(x))
    assert len(launches) == 2


def test_single_elements_may_have_any_stride(launches):
    x, cos, sin = inputs((1, 1, 24))
    odd = x.as_strided((1, 1, 24), (7, 3, 1)), cos.as_strided((1, 8), (3, 1)), sin
    dsa.apply_rotary(*odd, interleaved=True)
    [(variant, (rows, c, *_))] = launches
    assert is_wide(variant) and all(stride % 8 == 0 for stride in rows.stride()[:-1]) and c.stride(0) % 4 == 0


def test_angles_in_another_layout_are_copied(launches):
    x, cos, sin = inputs()
    dsa.apply_rotary(x, cos.T.contiguous().T, torch.nn.functional.pad(sin, (1, 0))[:, 1:], interleaved=True)
    [(_, (_, c, s, *_))] = launches
    assert torch.equal(c, cos) and torch.equal(s, sin) and c.is_contiguous() and s.is_contiguous()
