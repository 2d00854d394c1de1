"""The parts of an op that are made from its declaration: the choice between reference and kernels, the custom op with
gradients, and the checks. A signature of a call is checked once."""

from unittest import mock

import pytest
import torch

import dsa
from dsa.runtime import backends
from dsa.runtime import op as declaration
from dsa.runtime.arguments import F32, Arguments, Flag, Number, Tensor, at_most
from dsa.runtime.checks import ROWS
from dsa.runtime.op import Gradient, op
from dsa.runtime.recorded_calls import REPEATS
from tests.reference.common import assert_refused

checked, launched = [], []

SCALE_ROWS = Arguments(
    rule=lambda x, negate: checked.append((x, negate)),
    x=Tensor("T D", F32, layout=ROWS),
    by=Number(),
    negate=Flag(),
)
ADD_TO = Arguments(
    x=Tensor("T D", F32),
    out=Tensor("T D", F32, like="x", written=True),
    copy=Tensor("T D", F32, like="x", written=True, optional=True),
)


@pytest.fixture(scope="module", autouse=True)
def tables():
    with mock.patch.dict(declaration.OPS), mock.patch.dict(backends.ARCHS):
        yield


@pytest.fixture(scope="module")
def ops(tables):
    """Return {short name: op}. "scale" appends its arguments to `launched`. The launch functions and the references
    return different results."""

    @op(
        arguments=SCALE_ROWS,
        reference=_scaled,
        results=lambda x: torch.empty_like(x),
        limits={"D": at_most(64)},
        rule=_refuse_13,
        differentiable=True,
    )
    def _test_scale_rows(x: torch.Tensor, by: float, negate: bool) -> torch.Tensor:
        launched.append((x, by, negate))
        return torch.full_like(x, 7.0)

    @op(arguments=ADD_TO, reference=_add_to)
    def _test_add_to(x: torch.Tensor, out: torch.Tensor, copy: torch.Tensor | None) -> None:
        pass

    @op(
        arguments=Arguments(pair=Tensor("T", F32, name="a[0]"), other=Tensor("T", F32, name="a[1]")),
        reference=lambda a: (a[0] + a[1], a[0] - a[1]),
        results=lambda pair: (torch.empty_like(pair), torch.empty_like(pair)),
        out={"total": Tensor("T", F32)},
    )
    def _test_sums(
        pair: torch.Tensor, other: torch.Tensor, total: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.empty_like(pair) if total is None else total
        return total.fill_(5), torch.full_like(pair, 6)

    return {"scale": _test_scale_rows, "add": _test_add_to, "sums": _test_sums}


def _scaled(by, *, negate=False, x):
    return x * (-by if negate else by)


def _add_to(x, out, copy):
    out.add_(x)
    if copy is not None:
        copy.copy_(out)


def _refuse_13(by):
    if by == 13:
        raise ValueError("by: the kernel takes any number but 13")


@pytest.fixture(autouse=True)
def forget():
    checked.clear()
    launched.clear()
    declaration.forget_calls()


def scale(ops, times=1, by=2.0):
    for _ in range(times):
        result = ops["scale"](torch.randn(3, 8), by, False)
    return result


def test_the_kernels_of_the_gpu_run(ops, kernel_path):
    x = torch.randn(3, 8)
    assert (ops["scale"](x, 2.0, False) == 7).all()
    [(got, by, negate)] = launched
    assert got is x and (by, negate) == (2.0, False)
    ops["add"](x, torch.zeros(3, 8), None)


OTHERS = [
    (torch.randn(4, 8), 2.0, False),
    (torch.randn(3, 16)[:, :8], 2.0, False),
    (torch.randn(3, 8), 3.0, False),
    (torch.randn(3, 8), 2, False),
    (torch.randn(3, 8), 2.0, True),
]


@pytest.mark.parametrize("other", OTHERS)
def test_a_valid_call_is_checked_once(ops, kernel_path, other):
    scale(ops, times=3)
    assert len(checked) == 1 and len(launched) == 3
    ops["scale"](*other)
    assert len(checked) == 2


@pytest.fixture
def recorded(monkeypatch):
    """Return the arguments of recorded calls. These ops launch no kernels, so `record` is replaced, and recorded steps
    return "steps"."""
    found = []

    def record(call, arguments):
        found.append(arguments)
        return call(*arguments), lambda *again: "steps"

    monkeypatch.setattr(declaration, "record", record)
    return found


def test_a_call_that_comes_again_is_recorded_once(ops, kernel_path, recorded):
    assert (scale(ops, REPEATS) == 7).all()
    assert len(recorded) == 1 and len(launched) == REPEATS
    assert scale(ops) == "steps" and len(launched) == REPEATS
    assert (scale(ops, by=3.0) == 7).all()
    with dsa.use_backend("reference"):
        assert scale(ops) != "steps"


def test_after_an_error_while_it_is_recorded_a_call_counts_anew(ops, kernel_path, recorded, monkeypatch):
    scale(ops, REPEATS - 1)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(declaration, "record", mock.Mock(side_effect=MemoryError))
        scale(ops)
    scale(ops, REPEATS)
    assert len(recorded) == 1


def test_a_call_within_a_recorded_call_does_not_count(ops, kernel_path, recorded, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(declaration, "is_recording", lambda: True)
        scale(ops, 2 * REPEATS)
    scale(ops, REPEATS)
    assert len(recorded) == 1


def test_a_call_of_the_reference_computes_no_signature(ops, monkeypatch):
    """Computing a signature takes time, and needs addresses, which fake tensors do not have."""
    monkeypatch.setattr(declaration, "signature", lambda *_: pytest.fail("a signature"))
    scale(ops)


@pytest.mark.parametrize(
    ("x", "by", "negate", "message"),
    [
        (torch.zeros(2, 72), 2.0, False, r"x: the kernel takes at most 64 for D, got 72 \(kernels for sm_90\)"),
        (torch.zeros(2, 8), 13.0, False, r"by: the kernel takes any number but 13 \(kernels for sm_90\)"),
        (torch.zeros(2, 9)[:, :8], 2.0, False, "x: rows must start at multiples of 16 bytes"),
        (torch.zeros(2, 8), 2.0, 1, "negate: must be True or False, got 1"),
    ],
)
def test_an_invalid_call_is_refused_every_time(ops, kernel_path, x, by, negate, message):
    for _ in range(2):
        assert_refused(message, ops["scale"], x, by, negate)
    assert not launched


def test_the_reference_has_no_limits_and_takes_any_layout(ops):
    assert ops["scale"](torch.zeros(2, 72), 2.0, False).shape == (2, 72)
    assert ops["scale"](torch.zeros(2, 9)[:, :8], 2.0, False).shape == (2, 8)


def test_a_written_tensor_that_requires_a_gradient_is_refused_after_one_that_does_not(ops, kernel_path):
    x, out, copy = torch.zeros(2, 8), torch.zeros(2, 8), torch.zeros(2, 8)
    ops["add"](x, out, None)
    ops["add"](x, out, copy)
    message = "is written in place, must not require gradients"
    assert_refused(f"copy: {message}", ops["add"], x, out, copy.requires_grad_())
    assert_refused(f"out: {message}", ops["add"], x, out.requires_grad_(), None)
    with torch.no_grad():
        ops["add"](x, out, copy)


def test_an_op_is_one_node_of_a_compiled_graph(ops):
    x = torch.randn(3, 8)
    graphs = []

    def backend(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    compiled = torch.compile(lambda x: ops["scale"](x, 2.0, False) + 1, fullgraph=True, backend=backend)
    assert torch.equal(compiled(x), 2 * x + 1)
    assert [name for name in graphs[0] if "test_scale_rows" in name] and len(graphs) == 1


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(3, 8, dtype=torch.int32, device="meta"), "x: dtype must be float32, got int32"),
        (1.0, r"x: must be a torch\.Tensor, got float"),
    ],
)
def test_meta_tensors_and_numbers_are_refused_by_name(ops, x, message):
    assert_refused(message, ops["scale"], x, 2.0, True)


def test_another_gpu_has_no_kernel(ops, monkeypatch):
    monkeypatch.setattr(backends, "why_no_kernels", lambda: None)
    monkeypatch.setattr(backends, "arch_of", lambda _: "sm_100")
    with backends.use_backend("cute"), pytest.raises(ValueError, match="test_scale_rows: backend 'cute' was asked for"):
        scale(ops)


@pytest.fixture(scope="module")
def doubling(ops):
    """Return an op whose kernels accept only float32. Their gradient is 20, and the reference's is 2. The public
    function has another name than the op."""
    arguments = Arguments(x=Tensor("T", (torch.float32, torch.float64)))

    @op(arguments=arguments, reference=lambda x: 2 * x, results=lambda x: torch.empty_like(x), public="test_add_to")
    def _test_double_gradient(x: torch.Tensor) -> torch.Tensor:
        return 20 * x

    @op(
        arguments=arguments,
        reference=lambda x: 2 * x,
        results=lambda x: torch.empty_like(x),
        gradient=Gradient(lambda *_: None, lambda ctx, run, grad: (run(_test_double_gradient, grad),)),
        recorded=False,
        dtypes=(torch.float32,),
        public="test_add_to",
    )
    def _test_double(x: torch.Tensor) -> torch.Tensor:
        launched.append(x)
        return 2 * x

    return _test_double


def gradient(call, x):
    return torch.autograd.grad(call(x).sum(), x)[0].tolist()


@pytest.mark.parametrize("kernels", [False, True])
def test_an_op_with_a_backward_pass(doubling, kernels, request):
    x = torch.ones(2, requires_grad=True)
    if kernels:
        request.getfixturevalue("kernel_path")
    for call in (doubling, torch.ops.dsa.test_double, torch.compile(doubling, fullgraph=True, backend="aot_eager")):
        assert gradient(call, x) == ([20, 20] if kernels else [2, 2])
    with torch.no_grad():
        assert not doubling(x).requires_grad


def test_a_second_backward_pass_is_an_error(doubling, kernel_path):
    x = torch.ones(2, requires_grad=True)
    for call in (doubling, torch.ops.dsa.test_double):
        (grad,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match=r"backward through dsa\.test_double_gradient\.default but no autograd"):
            grad.sum().backward()


def test_an_op_that_is_not_recorded_launches_every_time(doubling, kernel_path):
    for _ in range(REPEATS + 2):
        doubling(torch.ones(2))
    assert len(launched) == REPEATS + 2 and not doubling.known.steps


def test_a_dtype_without_a_kernel_runs_the_reference_and_says_so(doubling, kernel_path, monkeypatch):
    monkeypatch.setattr(backends, "_warned", set())
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    with pytest.warns(UserWarning, match=r"dsa\.test_add_to in float64 has no Hopper kernel yet") as found:
        assert gradient(doubling, x) == [2, 2]
    assert [warning.filename for warning in found] == [__file__]
    assert_refused("x: dtype must be float32 or float64, got int32", doubling, torch.ones(2, dtype=torch.int32))


def test_errors_and_the_table_say_the_public_functions_name(doubling):
    assert backends.ARCHS["test_add_to"] == ["sm_90"] and "test_double" not in backends.ARCHS
    with dsa.use_backend("cute"), pytest.raises(ValueError, match="test_add_to: backend 'cute' was asked for"):
        doubling(torch.ones(2))


def test_arguments_may_be_checked_before_a_call(ops, kernel_path):
    assert_refused("x: the kernel takes at most 64 for D, got 72", ops["scale"].check, torch.zeros(2, 72), 2.0, False)
    ops["scale"].check(torch.zeros(2, 8), 2.0, False)
    ops["scale"](torch.zeros(2, 8), 2.0, False)
    assert len(checked) == 2 and len(launched) == 1


def test_functions_of_a_declaration_get_the_arguments_that_they_name(ops):
    x, op_ = torch.randn(3, 8), ops["scale"]
    assert torch.equal(op_.reference(x, 2.0, True), -2 * x)
    assert op_.results(x, 2.0, True).shape == x.shape and op_.rule(x, 2.0, True) is None
    # A function that takes all arguments in order is used without a wrapper.
    assert ops["add"].reference is _add_to


def _test_wrong(x: torch.Tensor, by: float, negate: bool) -> torch.Tensor:
    return x


def _test_wrong_order(x: torch.Tensor, negate: bool, by: float) -> torch.Tensor:
    return x


@pytest.mark.parametrize(
    ("launch", "changes", "message"),
    [
        (
            _test_wrong,
            {"reference": lambda x, scale: x},
            "reference of test_wrong: must take .* by their names, x, by, negate, got scale",
        ),
        (_test_wrong, {"results": lambda x, *rest: x}, r"results of test_wrong: must .* x, by, negate, got \*rest"),
        (_test_wrong, {"rule": lambda **all: None}, r"rule of test_wrong: must take .* x, by, negate, got \*\*all"),
        (_test_wrong, {"limits": {"C": (1,)}}, "limits of test_wrong: must be of .*D, T.*, got C"),
        (_test_wrong, {"results": None}, "results: must be given for an op that returns something, got None"),
        (_test_wrong_order, {}, "_test_wrong_order: must take x, by, negate, got x, negate, by"),
    ],
)
def test_a_function_with_other_arguments_is_refused(launch, changes, message):
    functions = {"reference": _scaled, "results": lambda x: x, "limits": {}} | changes
    with pytest.raises(TypeError, match=message):
        op(arguments=SCALE_ROWS, **functions)(launch)
    assert not any("test_wrong" in name for name in (*declaration.OPS, *backends.ARCHS))


def test_another_arch_has_its_launch(ops, kernel_path, monkeypatch):
    @ops["scale"].on("sm_100")
    def _test_scale_rows_sm100(x: torch.Tensor, by: float, negate: bool) -> torch.Tensor:
        return torch.full_like(x, 8.0)

    assert (scale(ops) == 7).all()
    monkeypatch.setattr(backends, "arch_of", lambda _: "sm_100")
    assert (scale(ops) == 8).all()
    x, message = torch.randn(3, 8), "test_sums: has no sm_100 kernel, only those for sm_90"
    assert_refused(message, ops["sums"].launch_on, x.device, x, x)
    assert backends.ARCHS["test_scale_rows"] == ["sm_90", "sm_100"]
    del ops["scale"].launches["sm_100"], backends.ARCHS["test_scale_rows"][1]


def test_outputs_of_the_caller(ops, request):
    """In torch, a separate op is registered for calls with an output."""
    x, y, total = torch.tensor([1.0, 2]), torch.tensor([3.0, 5]), torch.zeros(2)
    sums = ops["sums"]
    assert [found.tolist() for found in sums(x, y)] == [[4, 7], [-2, -3]]
    assert sums.into(x, y, total).tolist() == [-2, -3] and total.tolist() == [4, 7]
    assert_refused(r"total: shape must be \[2\], got \[3\]", sums.into, x, y, torch.zeros(3))
    message = "total: is written in place, must not require gradients"
    assert_refused(message, sums.into, x, y, torch.zeros(2, requires_grad=True))
    torch.library.opcheck(torch.ops.dsa.test_sums, (x, y))
    torch.library.opcheck(torch.ops.dsa.test_sums_out, (x, y, total))
    request.getfixturevalue("kernel_path")
    assert [found.tolist() for found in sums(x, y)] == [[5, 5], [6, 6]]
    assert sums.into(x, y, total).tolist() == [6, 6] and total.tolist() == [5, 5]
