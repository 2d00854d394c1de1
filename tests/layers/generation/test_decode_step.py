"""Tests of captured decoding passes, with a stand-in for CUDA graphs, and of decoding passes with recorded calls."""

import re
import subprocess
import sys

import pytest
import torch

from dsa_layers import Generator, Precision, SamplingParams, SequenceBatch, fuse, load_model, read_config
from dsa_layers.cache.drafts import DRAFTS
from dsa_layers.generation.steps import DecodeStep
from dsa_layers.models.deepseek_v32 import DeepseekV32ForCausalLM
from tests.layers.generation.families import FAMILIES
from tests.layers.generation.replay import capture_passes
from tests.layers.models import hf_models

PROMPTS = [list(range(40, 145)), [7, 8, 9], list(range(5, 38)), [100] * 17, [3]]


@pytest.fixture(scope="module", params=["v32", "v4"])
def model(request, checkpoint, tmp_path_factory):
    """A model with fp32 activations. With FP8 activations, tokens could depend on the size of the batch."""
    if request.param == "v32":
        torch.manual_seed(0)
        precision = Precision(torch.float32, False, True, "model")
        return fuse(DeepseekV32ForCausalLM(read_config(checkpoint), precision).eval())
    directory = tmp_path_factory.mktemp("v4")
    hf_models.deepseek_v4(directory)
    return load_model(directory, dtype=torch.float32, progress=False)


def generate(model, limits, **options):
    generator = Generator(model, cache_tokens=1024, page_size=64, **options)
    params = [SamplingParams(max_tokens=n) for n in limits]
    completions = generator.generate(PROMPTS, params)
    assert generator.cache.allocator.free == 16  # all 1024 / 64 pages; padding has an additional page
    return [c.tokens for c in completions]


def test_captured_steps_give_the_same_tokens(model, monkeypatch):
    limits, captured = [30, 5, 12, 3, 16], capture_passes(monkeypatch)
    got = generate(model, limits)
    # (sequences, pages), rounded up to powers of two. Five sequences end one by one; the last to end has three pages.
    assert [(inputs.count, inputs.pages) for _, inputs in captured] == [(8, 2), (4, 2), (2, 2), (1, 2), (1, 4)]
    few = generate(model, limits, max_sequences=2)
    with monkeypatch.context() as patch:
        patch.setattr(DecodeStep, "__call__", eager)
        expected = generate(model, limits)
    assert got == expected and few == expected
    assert [len(tokens) for tokens in got] == limits


def eager(self, sequences):
    """Replaces `DecodeStep.__call__`. Runs each sequence in its own pass, as a `SequenceBatch`."""
    rows = []
    for s in sequences:
        pages = [list(s.pages)]
        batch = SequenceBatch.paged([1], [len(s.tokens)], pages, self._cache.page_size, state_slots=[s.state_slot])
        rows.append(self._model(torch.tensor(s.tokens[-1:]), batch, self._cache))
    return torch.stack(rows), None


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_passes_launch_what_they_launched_before(family, tiny_checkpoint):
    command = [sys.executable, "-m", "tests.layers.generation.recorded_passes", tiny_checkpoint(family)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = [re.fullmatch(r"\d drafts: (\d+) launches, (\d+) ops recorded", line) for line in done.stdout.splitlines()]
    assert all(found) and len(found) == DRAFTS + 1, done.stdout
    assert all(int(match[1]) > 60 and int(match[2]) > 15 for match in found), done.stdout
