"""Whole models that fit on one GPU, with random FP8 weights: a checkpoint on disk is loaded and generated from.

There is a row for loading, and one per prompt length and number of decoding sequences. Each workload runs twice and the
second run counts, because in the first the engine captures its decoding passes.
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

from dsa_bench.e2e.command import Row, Tell, of_models
from dsa_bench.e2e.stacks import FP8, fill
from dsa_bench.harness.calls import free
from dsa_layers.config.fields import Fields
from dsa_layers.generation.generator import Generator
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.io.loading import load_model
from dsa_layers.io.published import published_manifest, scales_of
from dsa_layers.io.save import write_shards
from dsa_layers.io.tensors import TORCH_DTYPES
from dsa_layers.models.family import config_of, published_config

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
SEQUENCES, CONTEXT, STEPS = (1, 8, 32, 64), 4096, 64
OPTIONS = of_models(MODELS)


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
        file, changes = MODELS[name]
        directory = Path(tempfile.mkdtemp(dir=folder))
        try:
            begin = time.perf_counter()
            stored = write_random(published_config(file) | changes | {"quantization_config": FP8}, directory, device)
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
    model.config = replace(model.config, eos_token_ids=())  # every sequence gets all its tokens
    held = torch.cuda.memory_allocated() if device == "cuda" else 0
    yield {"shape": f"{name}: load", "seconds": seconds, "GB": stored / 1e9, "memory_gb": held / 1e9}
    tell(f"{name}: loaded in {seconds:.1f} s")
    for length in PROMPTS:
        row = _timed(model, [length], 1, device)
        yield {"shape": f"{name}: prefill 1 x {length}", **row, "tokens_s": length / row["seconds"]}
    for count in SEQUENCES:
        whole, first = (_timed(model, [CONTEXT] * count, new, device) for new in (STEPS + 1, 1))
        ms = (whole["seconds"] - first["seconds"]) / STEPS * 1e3
        yield {
            "shape": f"{name}: decode {count} x {CONTEXT}",
            "ms": ms,
            "tokens_s": count / ms * 1e3,
            "memory_gb": whole["memory_gb"],
        }
    tell(f"{name}: done")


def _timed(model: Any, lengths: Sequence[int], new: int, device: str) -> Row:
    """Return the seconds of a generation of `new` tokens per prompt, in its second run, and the most memory in use."""
    vocabulary = model.config.vocab_size
    prompts = [[(7 * i + at) % vocabulary for at in range(n)] for i, n in enumerate(lengths)]
    pages = sum(-(-(n + new) // model.page_size) for n in lengths)
    generator = Generator(model, cache_tokens=pages * model.page_size, max_sequences=len(lengths))
    seconds = 0.0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        begin = time.perf_counter()
        done = generator.generate(prompts, SamplingParams(max_tokens=new))
        seconds = time.perf_counter() - begin
        assert all(len(each.tokens) == new for each in done)
    return {
        "seconds": seconds,
        "memory_gb": torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0,
    }
