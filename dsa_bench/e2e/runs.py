"""What is timed of a stack: a long prompt in chunks, and one decoding step of many sequences."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from dsa.testing import bench
from dsa_layers.batch.prefill import Chunk, prefill_batch
from dsa_layers.families.model import Model
from dsa_layers.generation.decode_step import DecodeStep

Call = Callable[[], torch.Tensor]


@dataclass
class Cached:
    """A sequence all of whose tokens but the last are in the cache."""

    pages: list[int]
    state_slot: int
    context: int
    tokens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = [1 + self.state_slot] * self.context


@dataclass(frozen=True)
class Run:
    """What is timed, and the same where every kernel is launched by Python, so that its part is known. Both return the
    logits."""

    timed: Call
    launched: Call


def prefill(model: Model, tokens: int, chunk: int) -> Run:
    """A prompt of so many tokens, `chunk` at a time, into a cache of its own."""
    device = next(model.parameters()).device
    cache = model.make_cache(-(-tokens // model.page_size), device=device, state_slots=1)
    pages = range(cache.allocator.num_pages)
    prompt = torch.arange(tokens, device=device) % model.config.vocab_size

    @torch.inference_mode()
    def run() -> torch.Tensor:
        for begin in range(0, tokens, chunk):
            end = min(begin + chunk, tokens)
            batch = prefill_batch([Chunk(end - begin, begin, pages, 0)], cache.page_size, device)
            logits = model(prompt[begin:end], batch, cache)
        return logits

    return Run(run, run)


def decode(model: Model, count: int, context: int) -> Run:
    """A token for each of so many sequences of `context` tokens, whose caches hold bytes at random; as a graph."""
    device = next(model.parameters()).device
    each = -(-context // model.page_size)
    cache = model.make_cache(count * each + 2, device=device, state_slots=count + 2)
    for tensor in cache.tensors():
        # Finite in every layout: e4m3 of 1/4 to 1, floats of 2^-47 to 2^-16, exponents of 2^-87 to 2^-72.
        tensor.view(torch.uint8).random_(0x28, 0x38)
    graph, python = (DecodeStep(model, cache, capture=capture) for capture in (True, False))
    allocate = cache.allocator.allocate
    sequences = [Cached(allocate(each), state_slot, context) for state_slot in cache.state_slots.allocate(count)]
    return Run(lambda: graph(sequences), lambda: python(sequences))


def milliseconds(run: Call, repeats: int = 5) -> float:
    """The median of its time on the GPU's clock."""
    return bench({"run": run}, repeats=repeats)["run"]
