"""Tensors that are not plain strided tensors: sparse and nested tensors, tensors made in inference mode, and tensors
with a lazy sign.

If an op or its kernel cannot read such a tensor, the op raises an error that names the argument. torch itself raises no
such error: indexing some of these tensors crashes the process.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import dsa
from dsa.cases import CASES
from dsa.cases.case import same_bits


def _rows(x: torch.Tensor, layout: torch.layout) -> torch.Tensor:
    if x.dim() < 2 or x.dtype not in (torch.float32, torch.bfloat16):
        raise RuntimeError("not to be nested")
    return torch.nested.nested_tensor(list(x), layout=layout)


KINDS = {
    "coo": torch.Tensor.to_sparse,
    "csr": torch.Tensor.to_sparse_csr,
    "mkldnn": torch.Tensor.to_mkldnn,
    "nested": lambda x: _rows(x, torch.strided),
    "jagged": lambda x: _rows(x, torch.jagged),
}


def tensors(value: Any) -> Iterator[tuple[int | None, torch.Tensor]]:
    """Yield (index in the argument or None, tensor) for each tensor of an argument."""
    if isinstance(value, torch.Tensor):
        yield None, value
    elif isinstance(value, (list, tuple)):
        yield from ((i, x) for i, x in enumerate(value) if isinstance(x, torch.Tensor))


def replaced(value: Any, place: int | None, x: torch.Tensor) -> Any:
    return x if place is None else type(value)([*value[:place], x, *value[place + 1 :]])


@pytest.mark.filterwarnings("ignore")  # torch warns that the API of these tensors may change
@pytest.mark.parametrize("call", CASES, ids=lambda call: call.name)
def test_only_dense_tensors(call):
    tried = 0
    for name, value in call.arguments().items():
        for place, x in tensors(value):
            for kind in KINDS.values():
                try:
                    other = kind(x)
                except (RuntimeError, IndexError):  # torch cannot make such a tensor
                    continue
                tried += 1
                with pytest.raises(ValueError, match=rf"\b{name}\b.*dense"):
                    call.run({**call.arguments(), name: replaced(value, place, other)})
    assert tried or call.op == "make_v4_cache"  # make_v4_cache has no tensor arguments


@pytest.mark.parametrize("call", CASES, ids=lambda call: call.name)
def test_tensors_of_inference_mode(call):
    """Ops can read tensors made in inference mode everywhere, and write to them in that mode. Outside it, they raise
    ValueError before they write to any tensor."""
    expected = call.results(call.arguments())
    for name, value in call.arguments().items():
        for place, x in tensors(value):
            with torch.inference_mode():
                other = x.clone()
            arguments = {**call.arguments(), name: replaced(value, place, other)}
            if name not in call.written:
                assert all(map(same_bits, call.results(arguments), expected)), name
                continue
            before = {key: arguments[key].clone() for key in call.written if arguments[key] is not None}
            with pytest.raises(ValueError, match=rf"\b{name}: was made in inference mode"):
                call.run(arguments)
            assert all(same_bits(arguments[key], x) for key, x in before.items()), name
            with torch.inference_mode():
                assert all(map(same_bits, call.results(arguments), expected)), name


def test_a_lazy_sign_is_refused_where_a_kernel_runs(kernel_path):
    """The memory of a tensor with a lazy sign contains the numbers before the negation, and kernels would read
    these."""
    angles = torch.polar(torch.ones(4, 32), torch.rand(4, 32))
    cos, sin = angles.conj().real, angles.conj().imag
    assert sin.is_neg()
    x = torch.randn(4, 2, 64)
    with pytest.raises(ValueError, match=r"sin: must be negated in memory, .*; call resolve_neg\(\)"):
        dsa.apply_rotary(x, cos, sin, interleaved=True)


def test_a_reference_reads_a_lazy_sign():
    angles = torch.polar(torch.ones(4, 32), torch.rand(4, 32))
    x, cos, sin = torch.randn(4, 2, 64), angles.real, angles.conj().imag
    got, expected = (dsa.apply_rotary(x, cos, part, interleaved=True) for part in (sin, sin.resolve_neg()))
    assert torch.equal(got, expected)


def test_kernels_get_no_tensor_without_an_address(launches):
    """TwoTensor wraps tensors, like DTensor: it has sizes and strides, but no address."""
    x, weight = torch.randn(4, 64), torch.rand(64)
    for _ in range(2):  # the plain call is known, the others must not equal it
        dsa.rms_norm(x, weight)
        with pytest.raises(
            ValueError, match=r"^weight: must be a tensor with memory, got TwoTensor, which has no addr"
        ):
            dsa.rms_norm(x, TwoTensor(weight, weight))
        with pytest.raises(ValueError, match=r"^x: must be a tensor with memory, got TwoTensor"):
            dsa.rms_norm(TwoTensor(x, x), weight)
    assert len(launches) == 2
