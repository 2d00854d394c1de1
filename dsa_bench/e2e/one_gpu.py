"""Whole models that fit on one GPU, with random FP8 weights: a checkpoint on disk is loaded and generated from.

There is a row for loading, and one per prompt length and number of decoding sequences. A prompt runs twice and the
second run counts. Decoding steps count after the prompts of all sequences and WARM_UP steps.
"""

import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dsa.runtime.variants import Variant
from dsa_bench.e2e.command import Row, Tell, asked_of, in_order, of_models
from dsa_bench.e2e.stacks import FP8, fill, model_of
from dsa_bench.harness.calls import free
from dsa_layers.config.fields import Fields
from dsa_layers.generation.engine import Engine
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.io.loading import load_model
from dsa_layers.io.published import published_manifest, scales_of
from dsa_layers.io.save import write_shards
from dsa_layers.io.tensors import TORCH_DTYPES
from dsa_layers.models.family import config_of, published_config
from dsa_layers.models.protocols import CheckpointModel

_HY4_LAYERS = 34
# {name: (the pinned configuration's file, the fields that differ)}. Hy4's sizes are the class defaults of transformers
# 5.24; Hy4-preview is larger than one GPU.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "A.X-K2-Light": ("axk2_light_config.json", {}),
    "Hy4, 34 layers": (
        "hy_v4_config.json",
        {
            "hidden_size": 2816,
            "index_n_heads": 16,
            "indexer_types": ["full" if i == 0 or i % 4 == 1 else "shared" for i in range(_HY4_LAYERS)],
            "intermediate_size": 6912,
            "layer_types": ["deepseek_sparse_attention"] * _HY4_LAYERS,
            "mlp_layer_types": ["dense", *["sparse"] * (_HY4_LAYERS - 1)],
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
            "num_hidden_layers": _HY4_LAYERS,
            "num_key_value_heads": 32,
            "num_nextn_predict_layers": 0,
            "q_lora_rank": 1536,
        },
    ),
}
PROMPTS = (4096, 16384, 65536, 131072)
SEQUENCES, CONTEXT = (1, 8, 32, 64), 4096
CHUNK = 8192  # the most prompt tokens of a pass
WARM_UP, STEPS = 4, 64
OPTIONS = of_models(MODELS)


def fields_of(name: str) -> dict[str, Any]:
    file, changes = MODELS[name]
    return published_config(file) | changes | {"quantization_config": FP8}


def asked(models: Sequence[str]) -> list[Variant]:
    """Return the kernels that the rows need."""
    prompts = [[(min(n - at, CHUNK), at)] for n in PROMPTS for at in range(0, n, CHUNK)] + [[(CONTEXT, 0)] * 2]
    steps = [(count, CONTEXT + 1) for count in SEQUENCES]
    return in_order(asked_of(model_of(fields_of(name)), prompts, steps) for name in models)


def write_random(fields: dict[str, Any], directory: Path, device: str) -> int:
    """Write a checkpoint with random weights in the published format. Return its bytes."""
    config = config_of(Fields(fields, directory / "config.json"))
    manifest = published_manifest(config)
    scales = scales_of(manifest)
    generator = torch.Generator(device)

    def make(name: str) -> dict[str, torch.Tensor]:
        made = {}
        for part in (name, *filter(None, (scales.get(name),))):
            info = manifest[part]
            values = torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype], device=device)
            generator.manual_seed(zlib.crc32(part.encode()))
            fill(part, values, info.shape[-1], config, generator)
            made[part] = values.cpu()
        return made

    write_shards(directory, manifest, make, fields, like=directory, progress=False)
    return sum(info.size for info in manifest.values())


def rows(models: Sequence[str], tell: Tell, device: str = "cuda", folder: str | None = None) -> Iterator[Row]:
    for name in models:
        directory = Path(tempfile.mkdtemp(dir=folder))
        try:
            begin = time.perf_counter()
            stored = write_random(fields_of(name), directory, device)
            written = time.perf_counter() - begin
            tell(f"{name}: {stored / 1e9:.1f} GB written in {written:.1f} s")
            yield from rows_of(name, directory, stored, tell, device)
        finally:
            shutil.rmtree(directory)
            free()


def rows_of(name: str, directory: Path, stored: int, tell: Tell, device: str) -> Iterator[Row]:
    begin = time.perf_counter()
    model = load_model(directory, device=device, progress=False)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    held = torch.cuda.memory_allocated() if device == "cuda" else 0
    yield {"shape": f"{name}: load", "seconds": seconds, "GB": stored / 1e9, "memory_gb": held / 1e9}
    tell(f"{name}: loaded in {seconds:.1f} s")
    yield from workloads(name, model, device)
    tell(f"{name}: done")


def workloads(name: str, model: CheckpointModel, device: str) -> Iterator[Row]:
    model.config = replace(model.config, eos_token_ids=())  # every sequence gets all its tokens
    for length in PROMPTS:
        seconds, memory = _prompt(model, length, device)
        row = {"seconds": seconds, "tokens_s": length / seconds, "memory_gb": memory}
        yield {"shape": f"{name}: prefill 1 x {length}", **row}
    for count in SEQUENCES:
        seconds, memory = _steps(model, count, device)
        row = {"ms": 1e3 * seconds, "tokens_s": count / seconds, "memory_gb": memory}
        yield {"shape": f"{name}: decode {count} x {CONTEXT}", **row}


def _prompt(model: CheckpointModel, length: int, device: str) -> tuple[float, float]:
    """Return the seconds until the first token of a prompt, in the second of two runs, and the most GB in use."""
    engine = _engine(model, 1, length + 1, device)
    seconds = 0.0
    for run in range(2):
        engine.add_request(_tokens(model, run, length), SamplingParams(max_tokens=1))
        begin = time.perf_counter()
        while engine.unfinished:
            engine.step()
        seconds = time.perf_counter() - begin
    return seconds, _peak(device)


def _steps(model: CheckpointModel, count: int, device: str) -> tuple[float, float]:
    """Return the seconds of a decoding step of `count` sequences, the mean of STEPS steps, and the most GB in use."""
    tokens = -(-count * CONTEXT // CHUNK) + WARM_UP + STEPS + 1  # the first sequence also decodes between prefills
    engine = _engine(model, count, CONTEXT + tokens, device)
    prompts = [_tokens(model, i, CONTEXT) for i in range(count)]
    waiting = {engine.add_request(prompt, SamplingParams(max_tokens=tokens)) for prompt in prompts}
    while waiting:
        waiting -= {event.sequence for event in engine.step()}
    for _ in range(WARM_UP):
        engine.step()
    begin = time.perf_counter()
    for _ in range(STEPS):
        assert len(engine.step()) == count
    return (time.perf_counter() - begin) / STEPS, _peak(device)


def _engine(model: CheckpointModel, sequences: int, tokens: int, device: str) -> Engine:
    """Return an engine with room for sequences of `tokens` tokens, and begin to measure memory."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    cached = sequences * -(-tokens // model.page_size) * model.page_size
    return Engine(model, cache_tokens=cached, max_sequences=sequences, prefill_chunk=CHUNK)


def _tokens(model: CheckpointModel, number: int, count: int) -> list[int]:
    return [(7 * number + at) % model.config.vocab_size for at in range(count)]


def _peak(device: str) -> float:
    return torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0
