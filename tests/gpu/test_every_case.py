"""What the kernels of all ops do alike, over their cases (`dsa.cases`): right results in poisoned memory, the same bits
again, in CUDA graphs with new data, on busy streams, on a second GPU, in compiled graphs, and whatever lies beside the
arguments."""

import pytest
import torch

import dsa
from dsa.cases import CASES
from dsa.runtime import backends
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import among_nan, assert_same_bits, flat, on_a_late_stream
from tests.ops.test_every_op import NOT_ONE_GRAPH

CHECKED = [case for case in CASES if case.check is not None]
by_case = pytest.mark.parametrize("case", CHECKED, ids=lambda case: case.name)
ordered = pytest.mark.parametrize("case", [x for x in CHECKED if x.ordered], ids=lambda case: case.name)


def given(case, seed=0, device="cuda"):
    return case.arguments(device, seed, **case.sizes)


def written(case, arguments):
    return {name: arguments[name].clone() for name in case.written if arguments[name] is not None}


@torch.no_grad()
def copy(source, target):
    """Every tensor of arguments, leaves too."""
    for x, y in zip(flat([*source.values()]), flat([*target.values()]), strict=True):
        y.copy_(x)


@by_case
def test_right_in_poisoned_memory(case, record_error):
    for seed in range(3):
        poison_free_memory(mebibytes=64)
        record_error(case.verify_all("cuda", seed))


@ordered
def test_twenty_runs_have_the_same_bits(case):
    first = case.results(given(case))
    for _ in range(20):
        assert_same_bits(case.results(given(case)), first)


# Plain PyTorch, which may read a tensor on the host, has no kernel.
@pytest.mark.parametrize("case", [x for x in CHECKED if x.op in backends.ARCHS], ids=lambda case: case.name)
def test_a_graph_is_replayed_with_new_data(case):
    case.results(given(case))  # compiles: a capture cannot
    held, graph = given(case), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = case.results(held)
    for seed in range(1, 4):
        copy(given(case, seed), held)
        before = written(case, held)
        graph.replay()
        torch.cuda.synchronize()
        case.check(held | before, results)


@ordered
def test_a_call_runs_on_the_current_stream(case):
    """It reads what a busy stream writes into its arguments before."""
    held, new = given(case), given(case)
    with torch.no_grad():
        for x in flat([*held.values()]):
            x.zero_()
    assert_same_bits(on_a_late_stream(lambda: copy(new, held), case.results, held), case.results(given(case)))


@pytest.mark.several_gpus
@ordered
def test_arguments_on_another_gpu_than_the_current_one(case):
    expected = case.results(given(case))
    with torch.cuda.device(0):
        got = case.results(given(case, device="cuda:1"))
        assert torch.cuda.current_device() == 0
    assert all(x.device == torch.device("cuda", 1) for x in got)
    assert_same_bits([x.cpu() for x in got], [x.cpu() for x in expected])


@pytest.mark.parametrize("case", [x for x in CHECKED if x.ordered and x.op not in NOT_ONE_GRAPH], ids=lambda x: x.name)
def test_compiled(case, monkeypatch):
    """Gradients, too, where the case has some."""
    torch._dynamo.reset()
    expected = case.results(given(case))
    monkeypatch.setattr(dsa, case.op, torch.compile(case.function(), fullgraph=True, backend="aot_eager"))
    assert_same_bits(case.results(given(case)), expected)


@ordered
def test_what_lies_beside_an_argument_reaches_no_result(case):
    expected = case.results(given(case))
    for name, x in given(case).items():
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() > 1 and name not in case.written:
            arguments = given(case)
            arguments[name] = among_nan(x.detach()).requires_grad_(x.requires_grad)
            try:
                got = case.results(arguments)
            except ValueError as error:  # kernels take some of them in one piece
                assert name in str(error)
                continue
            assert_same_bits(got, expected)
