"""The benchmark of a long prompt among sequences that decode: a small one, on the CPU."""

import json
from functools import partial

import pytest

from dsa_bench.e2e import latency
from dsa_bench.e2e.stacks import stack
from tests.bench.small_stacks import FEWER, SMALL

FIGURES = ("ms", "ms_max", "alone_ms", "alone_ms_max", "first_token_s")


@pytest.fixture(scope="module")
def model():
    return stack("V3.2", "cpu", **SMALL, **FEWER["V3.2"])


def test_rows(model, capsys, monkeypatch):
    """Of the second of two runs, after which the cache is free."""
    seen, timed = [], latency._timed

    def noted(generator, *rest):
        seen.append(generator)
        return timed(generator, *rest)

    monkeypatch.setattr(latency, "_timed", noted)
    monkeypatch.setattr(latency, "stack", lambda name, device: model)
    sizes = ["--prompt", "20", "--sequences", "2", "--context", "3", "--steps", "1", "--chunks", "10"]
    assert latency.main(["--device", "cpu", "--models", "V3.2", *sizes]) == 0
    row = json.loads(capsys.readouterr().out)
    sizes = {"model": "V3.2", "prompt": 20, "sequences": 2, "context": 3, "prefill_chunk": 10}
    assert row == sizes | {figure: row[figure] for figure in FIGURES}
    assert all(row[figure] > 0 for figure in FIGURES)
    assert row["ms"] <= row["ms_max"] and row["alone_ms"] <= row["alone_ms_max"]
    first, second = seen
    assert first is second and first.cache.state_slots.free == 3


def test_figures(model, monkeypatch):
    """Of a clock by which a token of a prompt takes a second and a decoding pass two."""
    now = 0.0
    monkeypatch.setattr(latency.time, "perf_counter", lambda: now)

    def takes(passed, seconds, work, *rest):
        nonlocal now
        now += seconds(work)
        return passed(work, *rest)

    generator, *call = latency._call(model, 10, sizes := latency.Sizes(30, 2, 5, 3))
    passes = generator._passes
    passes.prefill = partial(takes, passes.prefill, lambda work: sum(n for _, n in work))
    passes.extend = partial(takes, passes.extend, lambda sequences: 2.0)
    row = latency._timed(generator, *call, sizes)
    assert {figure: row[figure] for figure in FIGURES} == {
        **{"ms": 12e3, "ms_max": 12e3, "alone_ms": 2e3, "alone_ms_max": 2e3},
        "first_token_s": 3 * 10 + 3 * 2.0,
    }


def test_without_a_gpu(capsys):
    with pytest.raises(SystemExit):
        latency.main(["--prompt", "30"])
    assert "a benchmark needs a GPU with kernels" in capsys.readouterr().err
