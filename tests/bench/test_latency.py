"""The benchmark of decoding while a long prompt is prefilled, with a small model on a CPU."""

import json
from functools import partial

import pytest

from dsa_bench.e2e import latency
from dsa_bench.e2e.stacks import STACKS
from tests.bench.small_stacks import small_stack

FIGURES = ("ms", "ms_max", "alone_ms", "alone_ms_max", "first_token_s")


@pytest.mark.slow
def test_rows_are_of_the_second_run_and_of_all_models(monkeypatch, recorded):
    runs = recorded(latency, "_timed")
    monkeypatch.setattr(latency, "stack", small_stack)
    rows = list(latency.rows(chunks=[10], sizes=latency.Sizes(20, 2, 3, 2), device="cpu"))
    assert json.loads(json.dumps(rows)) == rows
    for name, row in zip(STACKS, rows, strict=True):
        sizes = {"model": name, "prompt": 20, "sequences": 2, "context": 3, "prefill_chunk": 10}
        shown = {"shape": f"{name}, chunks of 10", "figure": f"{row['ms']:.1f} ms between tokens"}
        assert row == sizes | {figure: row[figure] for figure in FIGURES} | shown
        assert all(row[figure] > 0 for figure in FIGURES)
        assert row["ms"] <= row["ms_max"] and row["alone_ms"] <= row["alone_ms_max"]
    for (first, *_, warm), (second, *_, timed) in zip(runs[::2], runs[1::2]):
        assert first is second and (warm.steps, timed.steps) == (1, 2)
        assert first.cache.state_slots.free == 3


def test_figures_follow_from_the_passes(monkeypatch):
    """On the fake clock, prefill takes one second per token, and a decoding pass takes two seconds."""
    now, chunks = 0.0, []
    monkeypatch.setattr(latency.time, "perf_counter", lambda: now)
    generator, *call = latency._call(small_stack("V3.2"), 10, sizes := latency.Sizes(30, 2, 5, 3))
    passes = generator.passes

    def prefill(run, work, *rest):
        nonlocal now
        chunks.append(tuple((new, sequence.cached) for sequence, new in work))
        now += sum(new for _, new in work)
        return run(work, *rest)

    def extend(run, *arguments):
        nonlocal now
        now += 2.0
        return run(*arguments)

    passes.prefill, passes.extend = partial(prefill, passes.prefill), partial(extend, passes.extend)
    row = latency._timed(generator, *call, sizes)
    assert chunks == latency._work(10, sizes)  # the passes whose kernels are compiled in advance
    expected = {"ms": 12e3, "ms_max": 12e3, "alone_ms": 2e3, "alone_ms_max": 2e3, "first_token_s": 3 * 10 + 3 * 2.0}
    assert {figure: row[figure] for figure in FIGURES} == expected
