"""The bridge of the norm with a cast, on the CPU: dispatch, what it launches, torch.compile, errors with a name."""

import pytest
import torch
from torch import library

import dsa
from dsa.ops.elementwise import rms_norm_cast as op  # noqa: F401 -- `launches` looks at it
from dsa.reference.elementwise import rms_norm_cast as reference

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def inputs(tokens=5, channels=256, dtype=torch.bfloat16):
    x, residual = (torch.randn(tokens, channels).to(dtype) for _ in range(2))
    return x, residual, torch.randn(channels)


def same(got, expected):
    assert all(torch.equal(g.view(torch.uint8), e.view(torch.uint8)) for g, e in zip(got, expected, strict=True))


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_the_norm_and_its_cast(dtype, use_ue8m0):
    x, residual, weight = inputs(dtype=dtype)
    total = residual + x
    for h, (y, *cast) in (
        (x, dsa.rms_norm_cast_to_fp8(x, weight, 1e-3, use_ue8m0)),
        (total, dsa.add_rms_norm_cast_to_fp8(x, residual, weight, 1e-3, use_ue8m0)[1:]),
    ):
        same([y], [dsa.rms_norm(h, weight, 1e-3)])
        same(cast, dsa.per_token_cast_to_fp8(y, use_ue8m0))
        assert y.dtype == dtype
    same([dsa.add_rms_norm_cast_to_fp8(x, residual, weight)[0]], [total])


def test_runs_the_reference_without_a_gpu():
    x, residual, weight = inputs()
    same(dsa.rms_norm_cast_to_fp8(x, weight), reference.rms_norm_cast_to_fp8(x, weight))
    same(
        dsa.add_rms_norm_cast_to_fp8(x, residual, weight),
        reference.add_rms_norm_cast_to_fp8(x, residual, weight, 1e-6, True),
    )


def test_one_node_of_a_compiled_graph():
    x, residual, weight = inputs()
    compiled = torch.compile(dsa.add_rms_norm_cast_to_fp8, fullgraph=True, backend="aot_eager")
    same(compiled(x, residual, weight), dsa.add_rms_norm_cast_to_fp8(x, residual, weight))
    compiled = torch.compile(dsa.rms_norm_cast_to_fp8, fullgraph=True, backend="aot_eager")
    same(compiled(x, weight), dsa.rms_norm_cast_to_fp8(x, weight))


def test_registration():
    x, residual, weight = inputs(dtype=torch.float32)
    library.opcheck(torch.ops.dsa.rms_norm_cast_to_fp8.default, (x, weight, 1e-6, True))
    library.opcheck(torch.ops.dsa.add_rms_norm_cast_to_fp8.default, (x, residual, weight, 1e-6, False))


def test_results_have_no_gradient():
    x, residual, weight = inputs()
    x.requires_grad_()
    assert not any(t.requires_grad for t in dsa.add_rms_norm_cast_to_fp8(x, residual, weight))


def test_forcing_the_kernel_on_the_cpu_is_an_error():
    x, _, weight = inputs()
    with dsa.use_backend("cute"), pytest.raises(ValueError, match="rms_norm_cast_to_fp8: backend 'cute' was asked"):
        dsa.rms_norm_cast_to_fp8(x, weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_kernel_gets(dtype, launches):
    x, residual, weight = inputs(dtype=dtype)
    y, q, scale = dsa.rms_norm_cast_to_fp8(x, weight, 1e-5, False)
    total, *rest = dsa.add_rms_norm_cast_to_fp8(x, residual, weight)
    [(first, given), (second, added)] = launches
    assert first == (dtype, False, False, 256) and second == (dtype, True, True, 256)
    assert [a is b for a, b in zip(given, (x, None, weight, None, y, q, scale), strict=False)] == [True] * 7
    assert [a is b for a, b in zip(added, (x, residual, weight, total, *rest), strict=False)] == [True] * 7
    assert (given[7], added[7]) == (1e-5, 1e-6)
    assert (q.dtype, q.shape, scale.dtype, scale.shape) == (torch.float8_e4m3fn, (5, 256), torch.float32, (5, 2))


def test_parts_of_larger_tensors_are_used_where_they_are(launches):
    x, residual, weight = inputs(6, 512)
    dsa.add_rms_norm_cast_to_fp8(x[::2, :256], residual[:3, 128:384], weight[:256])
    assert [t.stride() for t in launches[0][1][:2]] == [(1024, 1), (512, 1)]


def test_nothing_to_norm(launches):
    x, residual, weight = inputs(0)
    assert [tuple(t.shape) for t in dsa.add_rms_norm_cast_to_fp8(x, residual, weight)] == [(0, 256)] * 3 + [(0, 2)]
    assert [tuple(t.shape) for t in dsa.rms_norm_cast_to_fp8(x, weight)] == [(0, 256)] * 2 + [(0, 2)]
    assert not launches


def test_what_it_does_not_take(launches):
    x, residual, weight = inputs()
    wide, odd = torch.zeros(1, 16512), torch.zeros(5, 260).bfloat16()
    for arguments, message in [
        (
            (x[:, :192], residual[:, :192], weight[:192]),
            r"x: the last dimension must be a multiple of 128, got .* 192\]",
        ),
        ((x[:, :0], residual[:, :0], weight[:0]), "x: the kernel takes a last dimension of 128 to 16384 for bfloat16"),
        ((wide, wide, wide[0]), "x: the kernel takes a last dimension of 128 to 8192 for float32, got .* 16512"),
        ((x, residual.float(), weight), "residual: must have x's dtype torch.bfloat16|residual: .*bfloat16"),
        ((x, residual[:4], weight), r"residual: shape must be \[5, 256\], got \[4, 256\]"),
        ((x, odd[:, :256], weight), "residual: rows must start at multiples of 16 bytes"),
        ((odd[:, 2:258], residual, weight), "x: rows must start at multiples of 16 bytes"),
        ((x, residual, weight.bfloat16()), "weight: "),
        ((x, residual, weight[:128]), r"weight: shape must be \[256\], got \[128\]"),
        ((x[0], residual, weight), "x: "),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            dsa.add_rms_norm_cast_to_fp8(*arguments)
    with pytest.raises((TypeError, ValueError), match="use_ue8m0: "):
        dsa.rms_norm_cast_to_fp8(x, weight, 1e-6, 2)
    with pytest.raises((TypeError, ValueError), match="eps: "):
        dsa.rms_norm_cast_to_fp8(x, weight, -1.0)
    assert not launches
