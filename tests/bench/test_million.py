"""The benchmark of contexts of a million tokens: small stacks on a CPU, with a host's clock; and the memory of a pass
over the real sizes, counted where tensors have no memory."""

import json
import time

import pytest
import torch

from dsa.runtime.asked_variants import asked_variants
from dsa_bench.e2e import million, plot
from dsa_bench.e2e.clock import Clock
from dsa_bench.e2e.million import prompt_shape, step_shape
from dsa_bench.e2e.parts import PARTS
from dsa_bench.e2e.runs import prefill
from dsa_bench.e2e.stacks import LONG_STACKS, skeleton, stack
from dsa_layers.compilation import passes
from dsa_layers.layers import attention, joint_linear
from dsa_layers.layers.key_selection import WORKSPACE
from dsa_layers.layers.moe import MoE
from tests.bench.peak_bytes import PeakBytes
from tests.bench.small_stacks import FEWER, SMALL

LENGTHS, SEQUENCES, CHUNK = (192, 96), (1, 3, 5), 32
PARTS_MS = dict(zip(PARTS, (1.0, 0.5, 2.0, 4.0, 0.5)))


class HostClock(Clock):
    """A pass takes a byte more than the one before it, in addition to 100 that are held."""

    passes = 0

    def mark(self):
        return time.perf_counter()

    def ms(self, begin, end):
        return 1000 * (end - begin)

    def held(self):
        return 100

    def free(self):
        return 10**12

    def forget_peak(self):
        self.passes += 1

    def peak(self):
        return 1000 + self.passes


@pytest.fixture
def small(monkeypatch):
    """Stacks and passes are small; a step of more than three sequences finds no memory."""
    for name, (file, fields) in LONG_STACKS.items():
        monkeypatch.setitem(LONG_STACKS, name, (file, fields | SMALL | FEWER[name]))
    monkeypatch.setattr("dsa_bench.e2e.stacks.STACKS", {})
    monkeypatch.setattr(million, "CHUNK", CHUNK)
    monkeypatch.setattr(million, "Clock", HostClock)

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


@pytest.mark.slow
def test_rows(small):
    """Each length is of the passes up to its own last one; sequences that do not fit are left out, and what is done."""
    told = []
    done = [prompt_shape("GLM-5.2", 192), step_shape("GLM-5.2", 1, 192)]
    rows = list(million.rows(lengths=LENGTHS, sequences=SEQUENCES, device="cpu", done=done, tell=told.append))
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
    # After the second pass, of which none is counted, the third takes a byte more, and the sixth four.
    assert [row["workspace"] for row in (first, second, step)] == [1, 4, None]
    assert [row["memory"] for row in (first, second)] == [1003, 1006]
    assert "V4-Flash: no memory for 5 sequences" in told


@pytest.mark.slow
def test_caches_that_do_not_fit_are_not_made(small, monkeypatch):
    """With room for those of one sequence and not of three, whose step is not even tried."""
    model = stack("GLM-5.2", "cpu")
    bytes_ = model.make_cache(3 * 3, device="meta", state_slots=3).nbytes
    monkeypatch.setattr(HostClock, "free", lambda clock: million.RESERVE + bytes_ - 1)
    rows = million.rows(["GLM-5.2"], [192], SEQUENCES, [prompt_shape("GLM-5.2", 192)], "cpu")
    assert [row["run"] for row in rows] == ["decode 1 x 192"]


@pytest.mark.parametrize("name", LONG_STACKS)
def test_passes_are_those_of_a_prompt(name):
    """The last one's logits are those of the prompt in one piece."""
    model = stack(name, "cpu", **SMALL, **FEWER[name])
    prompt = million.LongPrompt(model, 150, 64)
    for begin in (0, 64, 128):
        logits = prompt.compute(begin)
    assert torch.equal(logits, prefill(model, 1, 150, 64).timed())


def test_the_stack_of_glm_5_2():
    """One of four layers selects keys and three reuse its selection (published: 21 of 78 select); the rest is GLM-5's
    stack."""
    model = skeleton("GLM-5.2")
    assert [layer.self_attn.indexer is not None for layer in model.model.layers] == [True, False, False, False]
    assert [isinstance(layer.mlp, MoE) for layer in model.model.layers] == [False, True, True, True]
    assert 20e9 < sum(tensor.nbytes for tensor in model.state_dict().values()) < 60e9
    assert model.config.max_position_embeddings == 2**20 and model.config.rope.theta == 8e6


SIZES = [*((name, {}) for name in LONG_STACKS), ("GLM-5.2", SMALL | FEWER["GLM-5.2"])]


@pytest.mark.parametrize(("name", "small"), SIZES)
def test_a_long_context_takes_less_than_half_a_gibibyte(name, small):
    """A pass over 8192 tokens at a long context allocates under 512 MiB more than at 16K, without weights and caches.

    The contexts are a million tokens and the longest whose FP8 latents are dequantised at once (`most_read`). The small
    model has few heads, which doubles that limit, and small activations, which cannot hide growth.
    """
    model = skeleton(name, **small)
    model.init_buffers(passes.META)
    joint_linear.join(model)
    cache = model.eval().make_cache(2**20 // model.page_size, model.page_size, passes.META, state_slots=1)
    latents = attention.most_read(model.config.num_attention_heads) // (2 * 576)
    contexts = [2**14, 2**17, latents // 8192 * 8192, 2**20]
    needed = []
    with asked_variants("sm_90"):
        for context in contexts:
            with PeakBytes() as bytes_:
                passes.prefill(model, cache, [(8192, context - 8192)])
            needed.append(bytes_.peak)
    assert needed[0] > (2**28 if small else 2**30)  # activations: the count is one of what there is
    workspace = 8192 * 2048 * 14 // 5 if small else 0  # of `flash_mla_sparse_fwd`, which is not counted
    assert all(more + workspace - needed[0] < 2**29 for more in needed[1:])
    assert WORKSPACE < 2**29


@pytest.mark.slow
def test_kernels_that_are_asked_for():
    functions = {variant.function for variant in million.asked(lengths=[2**19], sequences=[4])}
    assert {"compile_sparse_mla_fp8_kv", "compile_sparse_mla_cast", "compile_fp8_mqa_logits"} < functions
    assert {"compile_fp8_paged_mqa_logits", "compile_topk_indices", "compile_sparse_mla"} < functions


def row(model, run, tokens, scale=1.0, workspace=2**28):
    parts = {part: scale * ms for part, ms in PARTS_MS.items()}
    found = {"shape": f"{model} {run}", "model": model, "run": run, "tokens": tokens, "ms": 2000.0 * scale}
    found |= {"tokens/s": tokens / 2 / scale, "pass_ms": 8.25 * scale, "parts": parts, "memory": 40 * 10**9}
    return found | {"workspace": workspace}


ROWS = [
    *(row("V4-Flash", "prompt 131072", 131072), row("V4-Flash", "prompt 1048576", 1048576, 4.0)),
    row("V4-Flash", "decode 8 x 1048576", 8, 1.0, None),
    row("GLM-5.2", "prompt 131072", 131072),
]


def test_a_picture_of_a_prompt_alone(tmp_path):
    plot.write_million(ROWS[:1], tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
