"""The timed runs of a stack: prompts, in passes over chunks of tokens, and one decoding step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

import dsa
from dsa_layers.batch.sequence_batch import Chunk, prefill_batch
from dsa_layers.cache.kv_cache import LATENT_FP8_BYTES, Cache
from dsa_layers.generation.steps import DecodeStep
from dsa_layers.models.protocols import Model

Call = Callable[[], torch.Tensor]
_V4_BYTES = 584
_TOKENS = 2**15  # largest number of tokens that `fill` writes at a time, to limit memory
# Standard deviation of the random states of V4's compressors (projections of the tokens of unfinished blocks). It is
# small compared with a new token's projections.
_STATE = 2**-8
SPARE = 4  # extra pages and extra state slots; each `DecodeStep` over a cache allocates one page and one slot


@dataclass
class Cached:
    """A decoding sequence of `context` tokens. All of them except the last are in the cache. drafts: the drafts that
    follow these tokens, which the pass verifies."""

    pages: list[int]
    state_slot: int
    context: int
    tokens: list[int] = field(init=False)
    drafts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.tokens = [1 + self.state_slot] * self.context


@dataclass(frozen=True)
class Run:
    """A prompt or a decoding step to time. timed: the run. launched: the same run, but every kernel is launched from
    Python, so that `parts` can attribute the time. Both return the logits. again: makes a new `Run` over the same
    cache, with a new graph."""

    timed: Call
    launched: Call
    again: "Callable[[], Run]"


class Prompts:
    """`count` prompts of `tokens` tokens each, and their cache. Each pass computes `chunk` tokens of the concatenated
    prompts. As in engines, a prompt can begin in one pass and end in a later one."""

    def __init__(self, model: Model, count: int, tokens: int, chunk: int) -> None:
        self._model, self._lengths, self._chunk = model, [tokens] * count, chunk
        device = next(model.parameters()).device
        self._pages = -(-tokens // model.page_size)
        self.cache = model.make_cache(count * self._pages, device=device, state_slots=count)
        self._tokens = torch.arange(count * tokens, device=device) % model.config.vocab_size

    @property
    def begins(self) -> range:
        """The index of each pass's first token among the concatenated prompts."""
        return range(0, len(self._tokens), self._chunk)

    @torch.inference_mode()
    def compute(self, begin: int) -> torch.Tensor:
        """Run the pass that begins with token `begin`. Return the logits of the last token of each prompt in the
        pass."""
        tokens, pages = self._tokens[begin : begin + self._chunk], self._pages
        parts = parts_of_prompts(self._lengths, begin, begin + len(tokens))
        chunks = [Chunk(new, cached, range(i * pages, (i + 1) * pages), i) for i, new, cached in parts]
        return self._model(tokens, prefill_batch(chunks, self.cache.page_size, tokens.device), self.cache)


def parts_of_prompts(lengths: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (index of the prompt, new tokens, earlier tokens) per prompt of a pass over tokens `begin` to `end` - 1.
    The tokens are those of the concatenated prompts."""
    first = 0
    for prompt, length in enumerate(lengths):
        cached = max(begin - first, 0)
        new = min(end - first, length) - cached
        if new > 0:
            yield prompt, new, cached
        first += length


def prefill(model: Model, count: int, tokens: int, chunk: int) -> Run:
    prompts = Prompts(model, count, tokens, chunk)

    def run() -> torch.Tensor:
        for begin in prompts.begins:
            logits = prompts.compute(begin)
        return logits

    def made() -> Run:
        return Run(run, run, made)

    return made()


def decode(model: Model, count: int, context: int) -> Run:
    """Decode one token of each of `count` sequences of `context` tokens, as a CUDA graph. The caches contain random
    numbers."""
    cache, places = filled(model, count, context)
    sequences = [Cached(*place, context) for place in places]

    def made() -> Run:
        graph, python = (DecodeStep(model, cache, capture=capture) for capture in (True, False))
        return Run(lambda: graph(sequences)[0][:, 0], lambda: python(sequences)[0][:, 0], made)

    return made()


def filled(model: Model, count: int, context: int) -> tuple[Cache, list[tuple[list[int], int]]]:
    """Make a filled cache. Return (cache, [(pages, state slot)] of `count` sequences of `context` tokens)."""
    pages = -(-context // model.page_size)
    cache = model.make_cache(count * pages + SPARE, device=next(model.parameters()).device, state_slots=count + SPARE)
    fill(cache)
    return cache, [(cache.allocator.allocate(pages), slot) for slot in cache.state_slots.allocate(count)]


@torch.inference_mode()
def fill(cache: Cache) -> None:
    """Fill a cache with Gaussian numbers, in the layers' format.

    The numbers decide which keys are selected, and the time of a selection depends on the distribution of the scores.
    With Gaussian keys the scores are distributed as in a prompt and have no ties. Keys with few bit patterns would have
    many ties.
    """
    states = {id(tensor) for tensor in cache.state_tensors() if tensor.dtype == torch.float32}
    for tensor in cache.tensors():
        if id(tensor) in states:
            tensor.normal_(std=_STATE)
        elif tensor.dtype == torch.uint8:
            _fill_bytes(tensor.flatten(0, -4))
        else:
            tensor.normal_()


def _fill_bytes(pages: torch.Tensor) -> None:
    """Fill pages [pages, P, 1, bytes]: latents of 656 or 584 bytes, or index keys with a scale of 4 bytes."""
    slots, width, device = len(pages) * pages.shape[1], pages.shape[3], pages.device
    channels = {LATENT_FP8_BYTES: 576, _V4_BYTES: 512}.get(width)
    for begin in range(0, slots, _TOKENS):
        slots_now = torch.arange(begin, min(begin + _TOKENS, slots), device=device)
        rows = torch.randn(len(slots_now), channels or width - 4, dtype=torch.bfloat16, device=device)
        if channels is None:
            keys, scales = dsa.per_token_cast_to_fp8(rows, True)
            dsa.write_indexer_cache(keys, scales[:, 0], pages, slots_now)
        else:
            dsa.write_kv_cache(rows, pages, slots_now)
