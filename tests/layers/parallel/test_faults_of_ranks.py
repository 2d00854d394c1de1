"""All ranks raise an error if a call differs or fails on one rank, so that no rank waits for another forever."""

import contextlib
import os
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import dsa
from dsa_layers import Generator, SamplingParams, load_model, write_tiny_checkpoint
from dsa_layers.io import loading
from tests.layers.io.stand_ins import changed
from tests.layers.parallel.processes import in_ranks

OPTIONS = {"dtype": torch.float32, "dequantize": True, "progress": False}
SAME = "must be the same on all ranks, got"
DIGESTS = r"one(s)? of digest \w{12} on rank 0 and one(s)? of digest \w{12} on rank 1"


def problem(call, *patches):
    """Return the message of the ValueError that `call` raises. patches: tuples of arguments of `mock.patch.object`."""
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        with pytest.raises(ValueError) as raised:
            call()
    return str(raised.value)


def problems_of_calls(ranks, directory):
    """Return (tokens sampled without a seed, the error messages of calls that are wrong or differ on one rank)."""
    rank, model = ranks.rank, load_model(directory, mesh=ranks, **OPTIONS)
    tokenizer = SimpleNamespace(encode=None, stream=None, eos_token_id=7 + rank)
    generator = Generator(model, None, cache_tokens=2048)
    (sampled,) = generator.generate([[5, 6, 7]], SamplingParams(max_tokens=8, temperature=1.0))
    found = [
        problem(call)
        for call in (
            lambda: generator.generate([[5, 6, 7 + rank]]),
            lambda: generator.generate([[5, 6, 7]], SamplingParams(max_tokens=4 + rank)),
            lambda: generator.generate([[5, 6, -rank]]),
            lambda: load_model(directory / ("" if rank == 0 else "none"), mesh=ranks, **OPTIONS),
            lambda: load_model(directory, mesh=ranks, **OPTIONS | {"dtype": (torch.float32, torch.bfloat16)[rank]}),
            lambda: Generator(model, None, cache_tokens=2048, prefill_chunk=100 + rank),
            lambda: Generator(model, None, cache_tokens=2048, prefill_chunk=1 - rank),
            lambda: Generator(model, tokenizer, cache_tokens=2048),
        )
    ]
    with mock.patch.dict(os.environ, {"DSA_BACKEND": ("cute", "reference")[rank]}):
        found += [
            problem(lambda: load_model(directory, mesh=ranks, **OPTIONS)),
            problem(lambda: generator.generate([[5, 6, 7]])),
        ]
    return sampled.tokens, found


def test_calls_that_differ_raise_on_all_ranks(checkpoint, monkeypatch):
    """Rank 0 adds "(rank 1)" to an error that only rank 1 finds. Without a seed, ranks sample the same tokens."""
    monkeypatch.delenv("DSA_BACKEND", raising=False)
    (tokens, first), (others, second) = in_ranks(2, problems_of_calls, checkpoint)
    assert tokens == others
    expected = [
        f"prompts: {SAME} {DIGESTS}",
        f"params: {SAME} {DIGESTS}",
        r".*prompts\[0\].*",
        ".*none.*",
        f"precision: {SAME} .*",
        f"prefill_chunk: {SAME} 100 on rank 0 and 101 on rank 1",
        "prefill_chunk: must be at least 1, got 0",
        rf"tokens that end: {SAME} \[.*",
        *[f"DSA_BACKEND: {SAME} cute on rank 0 and reference on rank 1"] * 2,
    ]
    for i, (mine, theirs, pattern) in enumerate(zip(first, second, expected, strict=True)):
        assert re.fullmatch(pattern, theirs, re.DOTALL), theirs
        assert mine == (f"{theirs} (rank 1)" if i in (2, 3, 6) else theirs)


def problems_of_loading(ranks, whole, broken, other):
    """Return {fault: `load_model`'s error}. `broken` lacks a tensor of rank 1, and `other` has other values."""

    def load(*patches, directory=whole):
        return problem(lambda: load_model(directory, mesh=ranks, **OPTIONS), *patches)

    rank, facts, gpu = ranks.rank, loading._facts, torch.device("cuda", 0)
    full = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    return {
        "missing": load(directory=broken),
        "weights": load(directory=(whole, other)[rank]),
        "room": load(*[(loading, "load_weights", full)] * rank),
        "device": load(
            (torch.cuda, "get_device_name", lambda _: ("NVIDIA H100", "NVIDIA H200")[rank]),
            (loading, "_facts", lambda checkpoint, precision, _: facts(checkpoint, precision, gpu)),
        ),
        "dsa": load((dsa, "__version__", ("1.0", "1.1")[rank])),
    }


def test_what_one_rank_finds_in_loading_all_raise(tiny_checkpoint, tmp_path):
    name = "model.layers.1.mlp.experts.7.down_proj.weight"
    whole = tiny_checkpoint("deepseek_v32", quantized=False)
    broken = changed(whole, tmp_path / "broken", lambda tensors: tensors.pop(name))
    write_tiny_checkpoint(tmp_path / "other", model="deepseek_v32", quantized=False, seed=7)
    first, second = in_ranks(2, problems_of_loading, whole, broken, tmp_path / "other")
    assert f"{name}: missing" in second["missing"] and first.pop("missing") == f"{second.pop('missing')} (rank 1)"
    assert second.pop("room") == "CUDA out of memory" and first.pop("room") == "CUDA out of memory (rank 1)"
    assert first == second
    assert re.fullmatch(f"checkpoint: {SAME} {DIGESTS}", first.pop("weights"))
    assert first == {
        "dsa": f"dsa: {SAME} 1.0 on rank 0 and 1.1 on rank 1",
        "device": f"device: {SAME} NVIDIA H100 on rank 0 and NVIDIA H200 on rank 1",
    }
