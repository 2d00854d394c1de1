"""Checks of all ops over their cases (`dsa.cases`).

Results are right if free memory is filled with NaN, and in CUDA graphs that are replayed with new data. They have the
same bits in repeated runs, on a busy stream, on a second GPU, in functions compiled with torch.compile, and for
arguments with other strides.
"""

from itertools import islice

import pytest
import torch

import dsa
from dsa.cases import CASES, indexer, mla, mla_windows, selection
from dsa.runtime import backends
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import assert_same_bits, at_other_strides, far_apart, flat, on_a_late_stream
from tests.ops.test_every_op import NOT_ONE_GRAPH
from tests.ops.test_tensor_kinds import replaced, tensors

CHECKED = [case for case in CASES if case.check is not None]
by_case = pytest.mark.parametrize("case", CHECKED, ids=lambda case: case.name)


# The PyTorch code of ops without kernels can copy a tensor to the host, which a capture forbids. It can also sum in an
# order that depends on strides.
WITH_KERNELS = [case for case in CHECKED if case.op in backends.ARCHS]
SIZED = [(case, sizes) for case in WITH_KERNELS for sizes in ({}, *case.more)]
# Arguments that can contain many keys or scores, and the cases of their ops.
KEYS = "kv", "k_cache", "extra_k_cache", "kv_cache", "cache", "compressed", "scores"
WITH_KEYS = [*indexer.CASES, *mla.CASES, *mla_windows.CASES, *selection.CASES]


def given(case, seed=0, device="cuda", **sizes):
    return case.arguments(device, seed, **case.sizes | sizes)


def name_of(value):
    return getattr(value, "name", str(value))


def written(case, arguments):
    return {name: arguments[name].clone() for name in case.written if arguments[name] is not None}


@torch.no_grad()
def copy(source, target):
    for x, y in zip(flat([*source.values()]), flat([*target.values()]), strict=True):
        y.copy_(x)


@by_case
def test_right_in_poisoned_memory(case, record_error):
    for seed in range(3):
        poison_free_memory(mebibytes=64)
        record_error(case.verify_all("cuda", seed))


@by_case
def test_twenty_runs_have_the_same_bits(case):
    first = case.results(given(case))
    for _ in range(20):
        assert_same_bits(case.results(given(case)), first)


@pytest.mark.parametrize("case", WITH_KERNELS, ids=lambda case: case.name)
def test_a_graph_is_replayed_with_new_data(case):
    case.results(given(case))  # kernels cannot be compiled in a capture
    held, graph = given(case), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = case.results(held)
    for seed in range(1, 4):
        copy(given(case, seed), held)
        before = written(case, held)
        graph.replay()
        torch.cuda.synchronize()
        case.check(held | before, results)


@by_case
def test_a_call_runs_on_the_current_stream(case):
    held, new = given(case), given(case)
    with torch.no_grad():
        for x in flat([*held.values()]):
            x.zero_()
    assert_same_bits(on_a_late_stream(lambda: copy(new, held), case.results, held), case.results(given(case)))


@pytest.mark.several_gpus
@by_case
def test_arguments_on_another_gpu_than_the_current_one(case):
    expected = case.results(given(case))
    with torch.cuda.device(0):
        got = case.results(given(case, device="cuda:1"))
        assert torch.cuda.current_device() == 0
    assert all(x.device == torch.device("cuda", 1) for x in got)
    assert_same_bits([x.cpu() for x in got], [x.cpu() for x in expected])


@pytest.mark.parametrize("case", [x for x in CHECKED if x.op not in NOT_ONE_GRAPH], ids=lambda x: x.name)
def test_compiled(case, monkeypatch):
    torch._dynamo.reset()
    expected = case.results(given(case))
    monkeypatch.setattr(dsa, case.op, torch.compile(case.function(), fullgraph=True, backend="aot_eager"))
    assert_same_bits(case.results(given(case)), expected)


@pytest.mark.parametrize(("case", "sizes"), SIZED, ids=name_of)
def test_strides_change_no_bit(case, sizes):
    for name, value in given(case, **sizes).items():
        for place, x in tensors(value) if name not in case.written else ():
            # PyTorch, not the op, copies gradients to other strides. So for tensors that require gradients only the
            # first pair is tested.
            for pair in islice(at_other_strides(x.detach()), 1 if x.requires_grad else None):
                plain, strided = (replaced(value, place, y.requires_grad_(x.requires_grad)) for y in pair)
                try:
                    expected = case.results(given(case, **sizes) | {name: plain})
                    got = case.results(given(case, **sizes) | {name: strided})
                except ValueError as error:
                    assert name in str(error)
                    continue
                assert_same_bits(got, expected)


@pytest.mark.parametrize(("case", "sizes"), [x for x in SIZED if x[0] in WITH_KEYS], ids=name_of)
def test_keys_may_be_more_than_2_to_the_31_bytes_apart(case, sizes):
    for name in KEYS:
        arguments = given(case, **sizes)
        if isinstance(arguments.get(name), torch.Tensor):
            expected = case.results(given(case, **sizes))
            assert_same_bits(case.results(arguments | {name: far_apart(arguments[name])}), expected)
