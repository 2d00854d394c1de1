"""Ops with gradients under torch.compile: one graph, and the results and gradients of eager calls."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import library
from torch.utils._python_dispatch import TorchDispatchMode

import dsa
from dsa.cases import CASES
from dsa.runtime.op import OPS

CALL = {call.name: call for call in CASES}
WARMUP = "indexer_warmup_attention"
# The arguments that get gradients, and the indices of the results that have gradients.
GRADIENTS = {
    "sparse_mla_attention": (("q", "kv", "attn_sink"), (0, 1)),
    "sparse_indexer_loss": (("q_idx", "k_idx", "w_idx"), (0,)),
    WARMUP: (("q", "k", "v", "q_idx", "k_idx", "w_idx"), (0, 2)),
}
by_op = pytest.mark.parametrize("name", GRADIENTS)
Function = Callable[..., Any]


def trained(name: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Return the arguments of a call, with `dtype` instead of bf16. The arguments in GRADIENTS are leaves."""
    given = {
        key: x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 else x
        for key, x in CALL[name].arguments().items()
    }
    for argument in GRADIENTS[name][0]:
        given[argument].requires_grad_()
    return given


def with_gradients(function: Function, name: str, given: dict[str, Any], **options: bool) -> list[torch.Tensor]:
    leaves, differentiable = GRADIENTS[name]
    found = function(**given)
    found = [found[i] for i in differentiable] if isinstance(found, tuple) else [found]
    upstream = [torch.arange(x.numel()).view(x.shape).sin().to(x.dtype) for x in found]
    return [*found, *torch.autograd.grad(found, [given[leaf] for leaf in leaves], upstream, **options)]


def assert_equal_gradients(function: Function, name: str, dtype: torch.dtype, tolerance: float) -> None:
    expected = with_gradients(CALL[name].function(), name, trained(name, dtype))
    for got, right in zip(with_gradients(function, name, trained(name, dtype)), expected, strict=True):
        assert got.dtype == right.dtype
        torch.testing.assert_close(got, right, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)]
)
@by_op
def test_one_graph_has_the_results_and_gradients_of_eager_calls(name, dtype, tolerance, backend):
    torch._dynamo.reset()
    compiled = torch.compile(CALL[name].function(), fullgraph=True, backend=backend)
    assert_equal_gradients(compiled, name, dtype, tolerance)


def test_one_graph_of_the_sparse_stage():
    torch._dynamo.reset()
    given = trained("sparse_indexer_loss", torch.float32)
    leaves = [given[name].requires_grad_() for name in ("q", "kv", "q_idx", "k_idx", "w_idx")]
    bounds = [torch.tensor([0, n], dtype=torch.int32) for n in (5, 7)]

    def loss(q, kv, q_idx, k_idx, w_idx):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            indexer = [x.bfloat16() for x in (q_idx, k_idx, w_idx)]
        q, kv = q.bfloat16() * 2, kv.bfloat16()
        indices = dsa.indexer_topk(*indexer, 3, *bounds, 5, 7)
        out, lse = dsa.sparse_mla_attention(q, kv, indices, 0.04, 512)
        kl = dsa.sparse_indexer_loss(q.detach(), kv.detach(), *indexer, indices, 0.04, lse.detach())
        return out.float().square().sum() + kl.sum()

    expected, got = loss(*leaves), torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves)
    torch.testing.assert_close(got, expected)
    for a, b in zip(*(torch.autograd.grad(x, leaves) for x in (got, expected)), strict=True):
        torch.testing.assert_close(a, b, atol=0.02, rtol=0.02)


def test_a_dtype_without_kernels_breaks_no_graph():
    """The kernels of `indexer_topk` accept only bf16, so for fp32 the graph contains the operators of the reference."""
    torch._dynamo.reset()
    given = CALL["indexer_topk"].arguments()
    given |= {name: x.float() for name, x in given.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    found = torch.compile(dsa.indexer_topk, fullgraph=True, backend="aot_eager")(**given)
    assert torch.equal(found, dsa.indexer_topk(**given))


@pytest.mark.parametrize("compiled", [False, True])
@by_op
def test_a_second_backward_pass_is_an_error(name, compiled, launches):
    function = CALL[name].function()
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True, backend="eager")
    given = trained(name)
    leaf = given["q" if name == "sparse_mla_attention" else "q_idx"]
    found = function(**given)
    last = found[-1] if isinstance(found, tuple) else found
    (gradient,) = torch.autograd.grad(last.sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match=r"Trying to backward through dsa\..*gradient.*no autograd formula"):
        torch.autograd.grad(gradient.sum(), leaf)


class Called(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, tuple[Any, ...], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        results = func(*args, **kwargs or {})
        if func.namespace == "dsa":
            own = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in args)
            self.found.append((func, own, results))
        return results


def called(name: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, tuple, Any]]:
    """Return (op, arguments, results) of the registered ops that run in a call and in the call's backward pass."""
    with monkeypatch.context() as patch, Called() as mode:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        with_gradients(CALL[name].function(), name, given)
    assert len(mode.found) == (3 if name == WARMUP else 2)
    return mode.found


@by_op
def test_torch_knows_the_op_and_its_gradients(name, monkeypatch):
    """A traced call must match the call that runs in shapes, strides and dtypes."""
    for op, own, _ in called(name, trained(name), monkeypatch):
        library.opcheck(op, own)


LIKE_V32 = {"lengths": ((3, 5), (2, 2)), "dims": (192, 128), "key_heads": 4, "leaves": GRADIENTS[WARMUP][0]}
ABSORBED = LIKE_V32 | {"dims": (576, 512), "key_heads": 1}


@pytest.mark.parametrize(
    ("name", "sizes"), [*((name, {}) for name in GRADIENTS), (WARMUP, LIKE_V32), (WARMUP, ABSORBED)]
)
def test_kernels_return_the_strides_that_torch_expects(name, sizes, launches, monkeypatch):
    """The code that torch.compile generates relies on these strides."""

    def flash(grad, q, k, v, *_, **__):
        return tuple(map(torch.empty_like, (q, k, v)))

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash)
    given = CALL[name].arguments(**sizes) if sizes else trained(name)
    if sizes == ABSORBED:
        monkeypatch.setitem(GRADIENTS, name, (("q", "k", "q_idx", "k_idx", "w_idx"), (0, 2)))
    for op, own, found in called(name, given, monkeypatch):
        expected = OPS[op._schema.name.removeprefix("dsa::")].results(*own)
        for got, right in zip(found, expected, strict=True):
            assert (got.shape, got.stride(), got.dtype) == (right.shape, right.stride(), right.dtype)


def test_only_ops_with_kernels_for_gradients_declare_them():
    assert {op.name for op in OPS.values() if op.gradient is not None} == {*GRADIENTS}
