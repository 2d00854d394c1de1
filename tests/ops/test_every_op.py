"""Properties of all ops, tested with the calls in CASES. For example, an op works under torch.compile, and runs the
reference without a GPU."""

import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import library

import dsa
from dsa import reference
from dsa.cases import CASES
from dsa.cases.case import Case, same_bits
from dsa.runtime import backends
from dsa.runtime.op import OPS, Op

by_call = pytest.mark.parametrize("call", CASES, ids=lambda call: call.name)
# Arguments that can be outputs of a public function. A reference without such an argument returns a new tensor instead.
OUTPUTS = {"out", "k", "k_scale"}
# Differentiable ops whose gradients come from kernels. The test files of these ops test their gradients.
OWN_GRADIENTS = ("rms_norm", "apply_rotary")
# Functions in plain PyTorch that read contents of tensors on the host, so torch.compile cannot make one graph of them.
NOT_ONE_GRAPH = {"compress_kv", "fp4_block_scales", "widen_fp4", "mqa_logits"}


def same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(got) == len(expected) and all(map(same_bits, got, expected))


def results(function: Callable[..., Any], arguments: dict[str, Any], written: Iterable[str] = ()) -> list[torch.Tensor]:
    """Return the tensors that a function returns, and those of the arguments in `written` that are not None."""
    found = function(**arguments)
    returned = [x for x in (found if isinstance(found, tuple) else (found,)) if isinstance(x, torch.Tensor)]
    return [*returned, *(arguments[name] for name in written if arguments[name] is not None)]


@by_call
def test_without_a_gpu_the_references_bits_come_back(call):
    of_reference = getattr(reference, call.op)
    outputs = {*call.arguments()} & OUTPUTS - {*inspect.signature(of_reference).parameters}
    if call.op == "get_mla_metadata":
        outputs = set()
    given = {name: x for name, x in call.arguments().items() if name not in outputs}
    written = [name for name in call.written if name not in outputs]
    assert same(results(call.function(), call.arguments(), written), results(of_reference, given, written))


def test_ops_have_the_parameters_and_defaults_of_their_references():
    for name in {call.op for call in CASES}:
        ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (dsa, reference))
        assert {*ours} - {*theirs} <= OUTPUTS and not {*theirs} - {*ours}, name
        assert {key: ours[key].default for key in theirs} == {key: x.default for key, x in theirs.items()}, name


@pytest.mark.parametrize("call", [x for x in CASES if x.op in backends.ARCHS], ids=lambda call: call.name)
def test_a_backend_that_cannot_run_is_an_error(call):
    arguments = call.arguments()
    # Dense decoding makes its plan first, so the error may come from get_mla_metadata.
    message = f"({call.op}|get_mla_metadata): backend 'cute' was asked for, but"
    with dsa.use_backend("cute"), pytest.raises(ValueError, match=message):
        call.run(arguments)


def registered(call: Case, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[tuple[Op, tuple]]:
    found, run = [], Op.run

    def noted(self: Op, *own: Any) -> Any:
        found.append((self, own))
        return run(self, *own)

    with monkeypatch.context() as patch:
        patch.setattr(Op, "run", noted)
        call.run(arguments)
    return found


def in_another_order(x: Any) -> Any:
    """Return copies of tensors in which the last dimension has the largest stride. Byte caches stay as they are,
    because their pages must be contiguous."""
    if isinstance(x, list | tuple):
        return type(x)(map(in_another_order, x))
    if not isinstance(x, torch.Tensor) or x.dim() < 2 or x.dtype == torch.uint8:
        return x
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def has_fp8(arguments: Iterable[Any]) -> bool:
    return any(isinstance(x, torch.Tensor) and x.is_floating_point() and x.itemsize == 1 for x in arguments)


@by_call
def test_torch_knows_what_an_op_returns_and_writes(call, monkeypatch):
    """The code that torch.compile generates relies on the shapes, strides and dtypes of fake results."""
    arguments = call.arguments()
    reordered = {name: x if name in call.written else in_another_order(x) for name, x in call.arguments().items()}
    for given in (arguments, reordered):
        for op, own in registered(call, given, monkeypatch):
            # test_schema compares inputs before and after the call, which torch cannot do for float8.
            tests = ("test_autograd_registration", "test_faketensor", *(() if has_fp8(own) else ("test_schema",)))
            library.opcheck(getattr(torch.ops.dsa, op.name).default, own, test_utils=tests)


FIRST = {call.op: call for call in reversed(CASES)}
ONE_GRAPH = [
    pytest.param(call, id=call.name, marks=[] if FIRST[call.op] is call else [pytest.mark.slow])
    for call in CASES
    if call.op not in NOT_ONE_GRAPH
]


@pytest.mark.parametrize("call", ONE_GRAPH)
def test_an_op_is_a_part_of_one_compiled_graph(call):
    torch._dynamo.reset()
    compiled = torch.compile(call.function(), fullgraph=True, backend="aot_eager")
    assert same(results(compiled, call.arguments(), call.written), call.results(call.arguments()))


def asking_for_gradients(arguments: dict[str, Any], name: str) -> dict[str, Any]:
    return arguments | {name: arguments[name].requires_grad_()}


def real(arguments: dict[str, Any]) -> list[str]:
    """Return the names of the fp32 and bf16 tensors, which can require gradients."""
    tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    return [name for name, x in tensors.items() if x.dtype in (torch.float32, torch.bfloat16)]


SELECTING = {"bias"}  # arguments that decide only which experts a token has, not their weights
DIFFERENTIABLE = [call for call in CASES if call.op in OPS and OPS[call.op].differentiable]


@pytest.mark.parametrize("call", [x for x in DIFFERENTIABLE if x.op not in OWN_GRADIENTS], ids=lambda call: call.name)
def test_gradients_run_the_formula(call, named_launches):
    for name in real(call.arguments()):
        found = call.run(asking_for_gradients(call.arguments(), name))
        assert any(x.requires_grad for x in found) == (name not in SELECTING) and not named_launches, name
        with torch.no_grad():
            call.run(asking_for_gradients(call.arguments(), name))
        assert named_launches, name
        named_launches.clear()


@pytest.mark.parametrize(
    "op",
    [
        "add_rms_norm_cast_to_fp8",
        "hyper_collapse_independent_norm_cast_to_fp8",
        "hyper_collapse_norm_cast_to_fp8",
    ],
)
def test_what_is_cast_has_no_gradient(op, request):
    """The first pass runs the reference, the second runs kernels."""
    for _ in range(2):
        for name in real(FIRST[op].arguments()):
            assert not any(x.requires_grad for x in FIRST[op].run(asking_for_gradients(FIRST[op].arguments(), name)))
        request.getfixturevalue("launches")


@pytest.mark.parametrize("call", CASES, ids=lambda call: call.name)
def test_tensors_elsewhere_are_refused_by_name(call):
    """All tensors must be on the device of the first tensor."""
    tensors = [name for name, x in call.arguments().items() if isinstance(x, torch.Tensor)]
    for name in tensors[1:]:
        with pytest.raises(ValueError, match=rf"({'|'.join(tensors)}): must be on .*device"):
            call.run(call.arguments() | {name: call.arguments()[name].to("meta")})


# Calls of ops whose references accept float32 but whose kernels do not.
IN_FLOAT32 = [
    *("flash_mla_sparse_fwd", "flash_mla_with_kvcache dense", "flash_mla_with_kvcache sparse"),
    *("sliding_window_attention", "window_sparse_attention", "sliding_window_decode", "window_attention_cast_to_fp8"),
    *("mla_absorb_queries", "sparse_mla_attention", "sparse_indexer_loss", "indexer_topk"),
    "indexer_warmup_attention",
]


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_a_dtype_without_kernels_runs_the_reference_and_says_so_where_there_is_a_gpu(name, request, monkeypatch):
    monkeypatch.setattr(backends, "_warned", set())
    call = next(call for call in CASES if call.name == name)
    arguments = call.arguments()
    arguments |= {key: arguments[key].float() for key in real(arguments)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = results(call.function(), arguments)
    launches = request.getfixturevalue("launches")
    with pytest.warns(UserWarning, match=rf"dsa\.{call.op} in float32 has no Hopper kernel yet") as found:
        for _ in range(2):
            assert same(results(call.function(), arguments), expected)
    assert [warning.filename for warning in found] == [__file__] and not launches


def test_a_given_output_joins_no_graph():
    out = torch.empty(3, 2, 512, dtype=torch.bfloat16)
    given = FIRST["flash_mla_sparse_fwd"].arguments()
    given["q"].requires_grad_()
    for _ in range(2):  # an output that required a gradient would be refused the second time
        dsa.flash_mla_sparse_fwd(**given | {"out": out})
        assert not out.requires_grad
