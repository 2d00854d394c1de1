"""An op records the steps of repeated calls with the same signature and replays them. Replayed calls must give the bits
of calls that are not recorded."""

import pytest
import torch

from dsa.cases import CASES
from dsa.cases.case import Maker, same_bits
from dsa.runtime.op import OPS, forget_calls
from dsa.runtime.recorded_calls import REPEATS


def arguments(call, seed):
    """Return arguments in new memory. Different seeds give the same signature, but different floats."""
    maker = Maker("cuda")
    maker.generator.manual_seed(seed)
    return call.make(maker)


def results(call, seed):
    return call.results(arguments(call, seed))


@pytest.mark.parametrize("call", CASES, ids=lambda call: call.name)
def test_recorded_calls_give_the_same_bits(call):
    seeds = range(REPEATS + 4)
    expected = []
    for seed in seeds:
        forget_calls()
        expected.append(results(call, seed))
    forget_calls()
    for seed, wanted in zip(seeds, expected):
        assert all(same_bits(x, y) for x, y in zip(results(call, seed), wanted, strict=True)), seed
    if any(call.op in (op.name, op.public) and op.recorded for op in OPS.values()):
        assert any(op.known.steps for op in OPS.values())


def test_recorded_calls_run_in_a_graph_and_on_another_stream():
    forget_calls()
    call = next(call for call in CASES if call.name == "rms_norm")
    for seed in range(REPEATS):
        results(call, seed)
    given = arguments(call, 1)
    wanted = call.run(given)
    with torch.cuda.stream(torch.cuda.Stream()):
        other = call.run(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call.run(given)
    graph.replay()
    torch.cuda.synchronize()
    for found in (other, captured):
        assert all(same_bits(x, y) for x, y in zip(found, wanted, strict=True))
