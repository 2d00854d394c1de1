"""transformers' DeepSeek-V3.2 with eager attention, and the same layers on dsa's ops: time, memory, and the length at
which eager attention runs out of memory. Eager attention's scores and masks grow with the square of the length.

usage: python -m dsa_bench.e2e.against_transformers [--layers N] [--tokens N...]

The layers are the model's first layers, which have dense MLPs, with real sizes and random weights in bf16. A prompt is
one pass without a cache. A decoding step is one token after a context, which both models read in chunks.
"""

import argparse
import gc
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dsa_bench.e2e.command import need_a_gpu
from dsa_layers import options

TOKENS = (2048, 4096, 8192, 16384, 32768)
CHUNK = 512  # tokens; with eager attention such a pass fits in memory at all lengths
REPEATS, STEPS = 3, 8


@dataclass(frozen=True)
class Row:
    """way: "eager", "dsa" or "dsa, FP8 index scores". run: "prompt" or "step". ms: the median, or None where memory did
    not suffice. gib: peak memory without the model."""

    way: str
    run: str
    tokens: int
    ms: float | None
    gib: float

    def text(self, eager: "Row | None" = None) -> str:
        """Return the row in words, with the speed-up over the row `eager`."""
        if self.ms is None:
            return "out of memory"
        ratio = "" if eager in (None, self) or eager.ms is None else f", {eager.ms / self.ms:.2f}x"
        return f"{self.ms:.2f} ms, {self.gib:.1f} GiB{ratio}"


def make_model(layers: int, device: str, **changes: Any) -> torch.nn.Module:
    from transformers import AutoModel, DeepseekV32Config

    fields = {"num_hidden_layers": layers, "first_k_dense_replace": layers, "vocab_size": 1024, "pad_token_id": None}
    config = DeepseekV32Config(**fields | {"attn_implementation": "eager"} | changes)
    with torch.device(device):
        return AutoModel.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)


@torch.no_grad()
def rows(model: torch.nn.Module, lengths: Sequence[int]) -> Iterator[Row]:
    """Measure all ways in turn. Afterwards the model runs on dsa's ops."""
    from dsa_layers.hf import accelerate

    ways: dict[str, Callable[[], Any]] = {
        "eager": lambda: None,
        "dsa": lambda: accelerate(model),
        "dsa, FP8 index scores": lambda: accelerate(model, fp8_indexer=True),
    }
    device = next(model.parameters()).device
    ids = torch.randint(model.config.vocab_size, (1, max(lengths) + 1 + STEPS), device=device)
    for way, begin in ways.items():
        begin()
        for tokens in lengths:
            yield Row(way, "prompt", tokens, *_measured(partial(_prompt, model, ids[:, :tokens]), device))
        for tokens in lengths:
            yield Row(way, "step", tokens, *_measured(partial(_steps, model, ids, tokens), device))


def table(found: Sequence[Row]) -> str:
    """Return a line per run and length: each way's time and memory, and its speed-up over eager attention."""
    ways = [*dict.fromkeys(row.way for row in found)]
    lines = [f"{'':<8}{'tokens':>8}" + "".join(f"{way:>36}" for way in ways)]
    for run, tokens in dict.fromkeys((row.run, row.tokens) for row in found):
        eager, *others = (row for row in found if (row.run, row.tokens) == (run, tokens))
        cells = "".join(f"{row.text(eager):>36}" for row in (eager, *others))
        lines.append(f"{run:<8}{tokens:>8}{cells}")
    return "\n".join(lines)


def _prompt(model: torch.nn.Module, ids: torch.Tensor) -> list[float]:
    times = [_ms(partial(model, ids, use_cache=False), ids.device) for _ in range(1 + REPEATS)]
    return times[1:]  # the first pass compiles kernels


def _steps(model: torch.nn.Module, ids: torch.Tensor, tokens: int) -> list[float]:
    from dsa_layers.hf.paged_layer import CACHE

    cache = None
    for first in range(0, tokens, CHUNK):
        chunk = ids[:, first : min(first + CHUNK, tokens)]
        cache = getattr(model(chunk, **{CACHE: cache}, use_cache=True), CACHE)
    columns = ids[:, tokens : tokens + 1 + STEPS].split(1, dim=1)
    return [_ms(partial(model, token, **{CACHE: cache}), ids.device) for token in columns][1:]


def _measured(run: Callable[[], list[float]], device: torch.device) -> tuple[float | None, float]:
    """Return median milliseconds and peak GiB."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    before = _peak(device)
    try:
        ms = statistics.median(run())
    except torch.OutOfMemoryError:
        ms = None
    return ms, (_peak(device) - before) / 2**30


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _ms(call: Callable[[], Any], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    call()
    wait()
    return 1e3 * (time.perf_counter() - began)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m dsa_bench.e2e.against_transformers")
    parser.add_argument("--layers", type=options.positive, default=2, metavar="N", help="default: %(default)s")
    lengths = " ".join(map(str, TOKENS))
    parser.add_argument("--tokens", type=options.positive, nargs="+", default=TOKENS, help=f"default: {lengths}")
    args = parser.parse_args(arguments)
    need_a_gpu(parser)
    if importlib.util.find_spec("transformers") is None:
        parser.error("the benchmark needs transformers: pip install transformers")
    found = []
    for row in rows(make_model(args.layers, "cuda"), args.tokens):
        found.append(row)
        print(f"{row.way}: {row.run} of {row.tokens} tokens: {row.text()}", flush=True)
    print(f"\n{args.layers} layers of DeepSeek-V3.2, bf16, {torch.cuda.get_device_name()}\n{table(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
