"""A part of an untested version is compared with the engine's own function at its first call."""

from types import SimpleNamespace as Space

import pytest
import torch

from dsa_engines import first_call


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def doubled(x):
    return 2 * x


@pytest.mark.parametrize("factor", [2.02, 3.0])
def test_the_first_result_is_the_engines(caplog, factor):
    call = first_call.compared(doubled, lambda _: lambda x: factor * x, "experts", "vllm")
    x = torch.arange(1.0, 9)
    assert torch.equal(call(x), 2 * x)
    assert torch.equal(call(x), (factor if factor < 2.1 else 2) * x)
    off = [record.getMessage() for record in caplog.records]
    expected = "dsa: vllm: experts differs from the engine's own by 5.0e-01; accepted is 0.05; "
    assert off == ([] if factor < 2.1 else [f"{expected}experts stays the engine's own"])


def test_results_that_are_written(caplog):
    def original(x, output):
        output.copy_(2 * x)

    def new(x, output):
        output.copy_(2 * x + 1e-3)

    call, x, output = first_call.compared(original, lambda _: new, "prefill", "vllm"), torch.ones(4), torch.zeros(4)
    call(x, output)
    assert torch.equal(output, 2 * x)
    call(x, output)
    assert torch.equal(output, 2 * x + 1e-3) and not caplog.records


def test_a_function_that_writes_to_its_input():
    """SGLang's experts may write their results over the tokens, and return them as `hidden_states`."""

    def original(x):
        return Space(hidden_states=x.mul_(2))

    def new(x):
        return Space(hidden_states=2.01 * x)

    call, x = first_call.compared(original, lambda _: new, "experts", "sglang"), torch.ones(3)
    assert call(x).hidden_states is x and torch.equal(x, torch.full((3,), 2.0))
    assert torch.equal(call(x).hidden_states, torch.full((3,), 4.02)) and torch.equal(x, torch.full((3,), 2.0))


def test_zeros_and_captured_calls_decide_nothing(monkeypatch):
    call = first_call.compared(doubled, lambda _: lambda x: 9 * x, "linear", "vllm")
    assert torch.equal(call(torch.zeros(3)), torch.zeros(3))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert torch.equal(call(torch.ones(3)), torch.full((3,), 2.0))
    good = first_call.compared(doubled, lambda _: doubled, "linear", "vllm")
    assert torch.equal(good(torch.ones(3)), torch.full((3,), 2.0))


def test_a_function_that_fails_stays_off(caplog):
    def fails(x):
        raise RuntimeError("no kernel\nof this shape")

    call = first_call.compared(doubled, lambda _: fails, "linear", "vllm")
    for _ in range(2):
        assert torch.equal(call(torch.ones(3)), torch.full((3,), 2.0))
    (record,) = caplog.records
    assert record.getMessage() == "dsa: vllm: no kernel of this shape; linear stays the engine's own"


def test_what_the_replacement_leaves_to_the_engine_runs_once_and_decides_nothing():
    calls = []

    def original(x):
        calls.append(x)
        return 2 * x

    def make(function):
        return lambda x: function(x) if len(x) > 3 else 2.01 * x

    call = first_call.compared(original, make, "experts", "sglang")
    assert torch.equal(call(torch.ones(4)), torch.full((4,), 2.0)) and len(calls) == 1
    assert torch.equal(call(torch.ones(3)), torch.full((3,), 2.0)) and len(calls) == 2
    assert torch.equal(call(torch.ones(3)), torch.full((3,), 2.01)) and len(calls) == 2
    assert torch.equal(call(torch.ones(4)), torch.full((4,), 2.0)) and len(calls) == 3
