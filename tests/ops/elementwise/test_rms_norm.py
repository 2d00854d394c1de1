"""`rms_norm` on a CPU: gradients, and the rows that kernels get."""

import pytest
import torch

import dsa
from dsa import reference
from dsa.kernels.elementwise.rms_norm_sm90 import choose_config

NORM = torch.ops.dsa.rms_norm
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def test_gradients_are_the_formulas_in_a_compiled_graph(launches):
    x, weight = torch.randn(3, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    function = torch.compile(dsa.rms_norm, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(function(x, weight).square().sum(), (x, weight))
    expected = torch.autograd.grad(reference.rms_norm(x, weight).square().sum(), (x, weight))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert not launches
    with torch.no_grad():
        assert not dsa.rms_norm(x, weight).requires_grad
    assert len(launches) == 1


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", [(16,), (3, 16), (2, 3, 16), (2, 3, 4, 16)])
def test_the_registered_gradients(shape, weighted):
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(16, requires_grad=True) if weighted else None
    wanted, grad = (x, weight) if weighted else (x,), torch.randn(shape)
    got = torch.autograd.grad(NORM(x, weight, 1e-3), wanted, grad)
    expected = torch.autograd.grad(reference.rms_norm(x, weight, 1e-3), wanted, grad)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    (alone,) = torch.autograd.grad(NORM(x.detach(), weight, 1e-3), weight, grad) if weighted else (None,)
    assert not weighted or torch.equal(alone, got[1])


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_gradients_kernel_gets(dtype, weighted, named_launches):
    wide = torch.randn(6, 4, 48).to(dtype).requires_grad_()
    x, weight = wide[:, 1:3, 8:24], torch.randn(16, requires_grad=True) if weighted else None
    y = dsa.rms_norm(x, weight, 1e-3)
    y.backward(torch.ones(()).to(dtype).expand(y.shape))
    (_, (kind, gained, config), (grad, rows, gain, dx, parts, eps, ctas)) = named_launches[1]
    assert [name for name, *_ in named_launches] == ["rms_norm", "rms_norm_gradient"]
    assert kind == str(dtype).removeprefix("torch.")
    assert rows.data_ptr() == x.data_ptr() and rows.stride() == x.stride() and eps == 1e-3
    assert grad.shape == rows.shape == dx.shape == (6, 2, 16) and grad.is_contiguous() and dx.is_contiguous()
    assert gained == weighted and (gain is None) == (parts is None) == (not weighted)
    assert ctas == 1 and config.threads // config.lanes == 16
    if weighted:
        assert gain.data_ptr() == weight.data_ptr() and parts.shape == (16, 16) and parts.dtype == torch.float32
        assert weight.grad.shape == (16,)
    assert wide.grad.shape == wide.shape and wide.grad.dtype == dtype


def test_gradients_of_rows_that_the_kernel_does_not_take(named_launches):
    rows = (torch.randn(shape) for shape in ((3, 12), (3, 4104), (0, 16)))
    others = torch.randn(16, 3).T, torch.randn(3, 20)[:, 1:17], torch.randn(4, 3, 2, 16).transpose(0, 1)
    for x in (*rows, *others):
        x.requires_grad_()
        (got,) = torch.autograd.grad(dsa.rms_norm(x, None).sum(), x)
        (expected,) = torch.autograd.grad(reference.rms_norm(x, None).sum(), x)
        assert torch.equal(got, expected)
    assert not named_launches


def test_the_gradients_kernel_gets_aligned_rows(named_launches):
    """The upstream gradient is a slice that begins at an unaligned address, so it is copied."""
    x = torch.randn(3, 16, requires_grad=True)
    torch.cat([torch.zeros(3), dsa.rms_norm(x, None).flatten()]).square().sum().backward()
    (_, _, (grad, *_)) = named_launches[1]
    assert grad.data_ptr() % 16 == 0 and grad.is_contiguous()


@pytest.mark.parametrize("x", [None, [1.0], torch.randn(2, 8, requires_grad=True)])
def test_wrong_arguments_where_gradients_are_asked_for(x, named_launches):
    weight = torch.ones(8, requires_grad=True)
    with pytest.raises(TypeError, match=r"^(x|eps): must be a "):
        dsa.rms_norm(x, weight, "1e-6")
    with pytest.raises(TypeError, match=r"^(x|weight): must be a "):
        dsa.rms_norm(x, [1.0])
    assert not named_launches


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    ("shape", "seen"),
    [
        ((8,), (1, 1, 8)),
        ((5, 8), (1, 5, 8)),
        ((3, 5, 8), (3, 5, 8)),
        ((2, 3, 5, 8), (6, 5, 8)),
        ((1, 1, 1, 1, 8), (1, 1, 8)),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_kernel_gets(dtype, shape, seen, weighted, launches):
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]) if weighted else None
    y = dsa.rms_norm(x, weight, 1e-5)
    [(variant, (rows, gain, out, eps))] = launches
    name = str(dtype).removeprefix("torch.")
    assert variant == (name, weighted, choose_config(name, 8)) and gain is weight and eps == 1e-5
    assert y.shape == shape and y.dtype == dtype and y.is_contiguous()
    assert rows.shape == out.shape == seen and rows.data_ptr() == x.data_ptr() and out.data_ptr() == y.data_ptr()


def test_parts_of_larger_tensors_are_used_where_they_are(launches):
    x = torch.randn(6, 4, 48).bfloat16()
    dsa.rms_norm(x[..., 8:24], None)
    dsa.rms_norm(x[:, 1:3].transpose(0, 1), None)
    dsa.rms_norm(x[0, 0].as_strided((1, 16), (7, 1)), None)  # the stride of a single row is arbitrary
    assert [rows.stride() for _, (rows, *_) in launches][:2] == [(192, 48, 1), (48, 192, 1)]
    assert all(stride % 8 == 0 for stride in launches[2][1][0].stride()[:-1])
