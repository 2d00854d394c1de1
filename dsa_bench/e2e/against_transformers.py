"""transformers' DeepSeek-V3.2 with eager and sdpa attention, and the same layers on dsa's ops: time, memory, and the
length at which transformers runs out of memory. Its index scores and masks grow with the square of the length.

The layers are the model's first layers, which have dense MLPs, with real sizes and random weights in bf16. A prompt is
one pass without a cache. A decoding step computes one token after a context, which was prefilled in chunks.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from dsa_bench.e2e.clock import Clock
from dsa_bench.e2e.command import Row, Tell, free, quiet
from dsa_layers import options
from dsa_layers.parallel.ranks import ALONE

TOKENS = (2048, 4096, 8192, 16384, 32768)
# Tokens per pass over a context. A pass of this size fits in memory for every context length in TOKENS.
CHUNK = 512
REPEATS, STEPS = 3, 8
THEIRS = "eager", "sdpa"  # transformers has no flash attention for this model
OPTIONS = {
    "--layers": {"type": options.positive, "default": 2, "metavar": "N", "help": "default: %(default)s"},
    "--tokens": {"type": options.positive, "nargs": "+", "default": TOKENS, "help": f"default: {TOKENS}"},
}


def make_model(layers: int, device: torch.device | str, **changes: Any) -> torch.nn.Module:
    from transformers import AutoModel, DeepseekV32Config

    fields = {"num_hidden_layers": layers, "first_k_dense_replace": layers, "vocab_size": 1024, "pad_token_id": None}
    config = DeepseekV32Config(**fields | {"attn_implementation": "eager"} | changes)
    with torch.device(device):
        return AutoModel.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)


def rows(
    layers: int = 2, tokens: Sequence[int] = TOKENS, clock: Clock | None = None, tell: Tell = quiet, **changes: Any
) -> Iterator[Row]:
    """Yield {"shape", "way", "run", "layers", "tokens", "ms", "gib", "ratio", "figure"} per way, run and number of
    tokens.

    way    "eager", "sdpa", "dsa" or "dsa, FP8 index scores"
    run    "prompt" or "step"
    tokens number of tokens of the prompt, or of the context before the steps
    ms     median milliseconds of REPEATS prompts or of STEPS steps, or None if memory did not suffice
    gib    peak GiB of tensors, without those that exist before the run, such as the model's weights
    ratio  ms of the faster one of eager and sdpa / ms, in the row of sdpa of eager; None if memory did not suffice

    changes: fields of the model's configuration. Raises ValueError without transformers.
    """
    if find_spec("transformers") is None:
        raise ValueError("the benchmark needs transformers: pip install transformers")
    return _rows(layers, tokens, clock or Clock(ALONE, torch.device("cuda")), tell, changes)


@torch.no_grad()
def _rows(layers: int, lengths: Sequence[int], clock: Clock, tell: Tell, changes: dict[str, Any]) -> Iterator[Row]:
    from dsa_layers.hf import accelerate

    model = make_model(layers, clock.device, **changes)
    ways: dict[str, Callable[[], Any]] = {
        **{way: partial(model.set_attn_implementation, way) for way in THEIRS},
        "dsa": lambda: accelerate(model),
        "dsa, FP8 index scores": lambda: accelerate(model, fp8_indexer=True),
    }
    ids = torch.randint(model.config.vocab_size, (1, max(lengths) + 1 + STEPS), device=clock.device)
    theirs: dict[tuple[str, int], list[float]] = defaultdict(list)
    for way, begin in ways.items():
        begin()
        for run, times in {"prompt": _prompt, "step": _steps}.items():
            for tokens in lengths:
                shape = f"{way}: {run} of {tokens} tokens"
                tell(shape)
                ms, gib = _measured(partial(times, model, ids, tokens), clock)
                fastest = min(theirs[run, tokens], default=None)
                if way in THEIRS and ms is not None:
                    theirs[run, tokens].append(ms)
                yield {
                    "shape": shape,
                    "way": way,
                    "run": run,
                    "layers": layers,
                    "tokens": tokens,
                    "ms": ms,
                    "gib": gib,
                } | compared(ms, gib, fastest)


def compared(ms: float | None, gib: float, theirs_ms: float | None) -> Row:
    if ms is None:
        return {"ratio": None, "figure": "out of memory"}
    ratio = None if theirs_ms is None else theirs_ms / ms
    return {"ratio": ratio, "figure": f"{ms:.2f} ms, {gib:.1f} GiB" + ("" if ratio is None else f", {ratio:.2f}x")}


def _prompt(model: torch.nn.Module, ids: torch.Tensor, tokens: int) -> list[float]:
    times = [_ms(partial(model, ids[:, :tokens], use_cache=False), ids.device) for _ in range(1 + REPEATS)]
    return times[1:]  # the first pass compiles kernels


def _steps(model: torch.nn.Module, ids: torch.Tensor, tokens: int) -> list[float]:
    cache = None
    for chunk in ids[:, :tokens].split(CHUNK, dim=1):
        cache = model(chunk, cache=cache, use_cache=True).cache
    columns = ids[:, tokens : tokens + 1 + STEPS].split(1, dim=1)
    return [_ms(partial(model, token, cache=cache), ids.device) for token in columns][1:]


def _measured(times: Callable[[], list[float]], clock: Clock) -> tuple[float | None, float]:
    """Return (median milliseconds, or None if memory does not suffice; peak GiB beyond the memory allocated before)."""
    free()
    clock.forget_peak()
    held = clock.held()
    try:
        ms = statistics.median(times())
    except torch.OutOfMemoryError:
        ms = None
    return ms, (clock.peak() - held) / 2**30


def _ms(call: Callable[[], Any], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    call()
    wait()
    return 1e3 * (time.perf_counter() - began)
