"""The benchmark of contexts of a million tokens, with small stacks on a CPU. The memory of a pass at real sizes,
counted on the meta device."""

import json

import pytest
import torch

from dsa.runtime.asked_variants import asked_variants
from dsa.testing import calc_diff
from dsa_bench.e2e import million
from dsa_bench.e2e.parts import PARTS
from dsa_bench.e2e.runs import Prompts, prefill
from dsa_bench.e2e.stacks import LONG_STACKS, skeleton, stack
from dsa_layers import compilation
from dsa_layers.engine import paged_attention
from dsa_layers.engine.fuse import prepare
from dsa_layers.layers.key_selection import WORKSPACE
from dsa_layers.parallel.ranks import ALONE
from tests.bench.parallel_ranks import HostClock
from tests.bench.peak_bytes import PeakBytes
from tests.bench.small_stacks import FEWER, SMALL, make_small, small_stack

LENGTHS, SEQUENCES, CHUNK = (192, 96), (1, 3, 5), 32
PARTS_MS = dict(zip(PARTS, (1.0, 0.5, 2.0, 4.0, 0.5)))


class CountingClock(HostClock):
    passes, room = 0, 10**12

    def held(self):
        return 100

    def free(self):
        return self.room

    def forget_peak(self):
        self.passes += 1

    def peak(self):
        return 1000 + self.passes


@pytest.fixture
def clock(monkeypatch):
    """Return the clock. Stacks and passes are small. A step of more than three sequences runs out of memory."""
    for name in LONG_STACKS:
        monkeypatch.setitem(LONG_STACKS, name, LONG_STACKS[name])
    make_small(LONG_STACKS)
    monkeypatch.setattr("dsa_bench.e2e.stacks.STACKS", {})
    monkeypatch.setattr(million, "CHUNK", CHUNK)

    def gpu_ms(model, call):
        assert call().isfinite().all()
        return PARTS_MS

    def bench(calls, repeats):
        assert repeats == million.STEP_REPEATS
        ((name, call),) = calls.items()
        if len(call()) > 3:
            raise torch.OutOfMemoryError
        return {name: 0.5}

    monkeypatch.setattr(million, "gpu_ms", gpu_ms)
    monkeypatch.setattr(million, "bench", bench)
    return CountingClock(ALONE)


@pytest.mark.slow
def test_rows_of_prompts_are_the_passes_up_to_their_length(clock):
    told = []
    done = ["GLM-5.2 prompt 192", "GLM-5.2 decode 1 x 192"]
    options = {"lengths": LENGTHS, "sequences": SEQUENCES, "done": done, "device": "cpu"}
    rows = list(million.rows(**options, clock=clock, tell=told.append))
    assert json.loads(json.dumps(rows)) == rows
    assert [row["shape"] for row in rows] == [
        *("V4-Flash prompt 96", "V4-Flash prompt 192", "V4-Flash decode 1 x 192", "V4-Flash decode 3 x 192"),
        *("GLM-5.2 prompt 96", "GLM-5.2 decode 3 x 192"),
    ]
    for row in rows:
        assert row["parts"] == PARTS_MS and row["tokens"] == int(row["run"].split()[1])
        assert row["tokens/s"] == pytest.approx(row["tokens"] / row["ms"] * 1e3)
        assert row["figure"] == f"{row['tokens/s']:.0f} tokens/s"
    first, second, step, _ = rows[:4]
    assert 0 < first["pass_ms"] < first["ms"] < second["ms"] and step["ms"] == step["pass_ms"] == 0.5
    # `workspace` is the growth of the peak since the second pass.
    assert [row["workspace"] for row in (first, second, step)] == [1, 4, None]
    assert [row["memory"] for row in (first, second)] == [1003, 1006]
    assert "V4-Flash: no memory for 5 sequences" in told


@pytest.mark.slow
def test_caches_that_do_not_fit_are_not_made(clock):
    cache = stack("GLM-5.2", "cpu").make_cache(3 * 3, device="meta", state_slots=3)
    clock.room = million.RESERVE + cache.nbytes - 1
    rows = million.rows(["GLM-5.2"], [192], SEQUENCES, ["GLM-5.2 prompt 192"], "cpu", clock)
    assert [row["run"] for row in rows] == ["decode 1 x 192"]


@pytest.mark.parametrize("name", LONG_STACKS)
def test_the_last_pass_has_the_logits_of_the_prompt_in_one_piece(name):
    model = small_stack(name)
    prompt = Prompts(model, 1, 150, 64)
    assert [*prompt.begins] == [0, 64, 128]
    for begin in prompt.begins:
        logits = prompt.compute(begin)
    assert calc_diff(logits, prefill(model, 1, 150, 150).timed()) < 1e-3


SIZES = [*((name, {}) for name in LONG_STACKS), ("GLM-5.2", SMALL | FEWER["GLM-5.2"])]


@pytest.mark.parametrize(("name", "small"), SIZES)
def test_a_long_context_takes_less_than_half_a_gibibyte(name, small):
    """Compared to a context of 16K tokens, a pass at the end of a long context allocates less than 512 MiB more.

    One of the contexts is the longest whose FP8 latents are dequantised at once (`most_read`). It is twice as long with
    at most 16 heads, so the test also runs with a small model of 4 heads.
    """
    model = skeleton(name, **small)
    model.init_buffers(compilation.META)
    prepare(model)
    cache = model.eval().make_cache(2**20 // model.page_size, model.page_size, compilation.META, state_slots=1)
    latents = paged_attention.most_read(model.config.num_attention_heads) // (2 * 576)
    contexts = [2**14, 2**17, latents // 8192 * 8192, 2**20]
    needed = []
    with asked_variants("sm_90"):
        for context in contexts:
            with PeakBytes() as count:
                compilation.prefill(model, cache, [(8192, context - 8192)])
            needed.append(count.peak)
    assert needed[0] > (2**28 if small else 2**30)  # the counter counts activations
    # `flash_mla_sparse_fwd` with at most 16 heads needs 2.8 bytes per index. `PeakBytes` does not count them.
    workspace = 8192 * 2048 * 14 // 5 if small else 0
    assert all(more + workspace - needed[0] < 2**29 for more in needed[1:])
    assert WORKSPACE < 2**29
