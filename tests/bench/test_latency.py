"""The benchmark of a long prompt among sequences that decode: a small one, on the CPU."""

import json
from functools import partial

import pytest

from dsa_bench.e2e import latency
from dsa_bench.e2e.stacks import STACKS, skeleton, stack
from tests.bench.small_stacks import FEWER, SMALL

FIGURES = ("ms", "ms_max", "alone_ms", "alone_ms_max", "first_token_s")


@pytest.fixture(scope="module")
def model():
    return stack("V3.2", "cpu", **SMALL, **FEWER["V3.2"])


@pytest.mark.slow
def test_rows(monkeypatch):
    """Of the second of two runs, after which the cache is free; of all models by default."""
    seen, timed = [], latency._timed

    def noted(generator, prompts, params, sizes):
        seen.append((generator, sizes.steps))
        return timed(generator, prompts, params, sizes)

    monkeypatch.setattr(latency, "_timed", noted)
    monkeypatch.setattr(latency, "stack", lambda name, device: stack(name, device, **SMALL, **FEWER[name]))
    rows = list(latency.rows(chunks=[10], sizes=latency.Sizes(20, 2, 3, 2), device="cpu"))
    assert json.loads(json.dumps(rows)) == rows
    for name, row in zip(STACKS, rows, strict=True):
        sizes = {"model": name, "prompt": 20, "sequences": 2, "context": 3, "prefill_chunk": 10}
        shown = {"shape": f"{name}, chunks of 10", "figure": f"{row['ms']:.1f} ms between tokens"}
        assert row == sizes | {figure: row[figure] for figure in FIGURES} | shown
        assert all(row[figure] > 0 for figure in FIGURES)
        assert row["ms"] <= row["ms_max"] and row["alone_ms"] <= row["alone_ms_max"]
    for (first, warm), (second, steps) in zip(seen[::2], seen[1::2]):
        assert first is second and first.cache.state_slots.free == 3 and (warm, steps) == (1, 2)


def test_kernels_that_are_asked_for(monkeypatch):
    monkeypatch.setattr(latency, "skeleton", lambda name: skeleton(name, **SMALL, **FEWER[name]))
    asked = latency.asked(["V4-Flash"], [512], latency.Sizes(prompt=4096))
    assert {"dsa.kernels.mla", "dsa.kernels.indexer", "dsa.kernels.moe"} <= {v.module.rpartition(".")[0] for v in asked}


def test_figures(model, monkeypatch):
    """Of a clock by which a token of a prompt takes a second and a decoding pass two."""
    now = 0.0
    monkeypatch.setattr(latency.time, "perf_counter", lambda: now)

    def takes(passed, seconds, work, *rest):
        nonlocal now
        if seconds is tokens:
            chunks.append(tuple((new, sequence.cached) for sequence, new in work))
        now += seconds(work)
        return passed(work, *rest)

    generator, *call = latency._call(model, 10, sizes := latency.Sizes(30, 2, 5, 3))
    passes, chunks = generator._passes, []

    def tokens(work):
        return sum(new for _, new in work)

    passes.prefill = partial(takes, passes.prefill, tokens)
    passes.extend = partial(takes, passes.extend, lambda sequences: 2.0)
    row = latency._timed(generator, *call, sizes)
    assert chunks == latency._work(10, sizes)  # which kernels are compiled for
    assert {figure: row[figure] for figure in FIGURES} == {
        **{"ms": 12e3, "ms_max": 12e3, "alone_ms": 2e3, "alone_ms_max": 2e3},
        "first_token_s": 3 * 10 + 3 * 2.0,
    }
