"""The timed runs of a stack: prompts in passes of a chunk of tokens, and one decoding step."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import dsa
from dsa_layers.batch.prefill import Chunk, prefill_batch
from dsa_layers.cache.cache import Cache
from dsa_layers.cache.kv_cache import LATENT_FP8_BYTES
from dsa_layers.families.model import Model
from dsa_layers.generation.decode_step import DecodeStep

Call = Callable[[], torch.Tensor]
_V4_BYTES = 584
_TOKENS = 2**15  # at a time
_STATE = 2**-8  # std of unfinished blocks' projections: small compared with a token's
SPARE = 4  # pages and state slots; each way to launch a step takes one


@dataclass
class Cached:
    """A sequence with all tokens except the last in the cache."""

    pages: list[int]
    state_slot: int
    context: int
    tokens: list[int] = field(init=False)
    drafts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.tokens = [1 + self.state_slot] * self.context


@dataclass(frozen=True)
class Run:
    """timed: the run. launched: the same run with every kernel launched from Python, so that its part is known. Both
    return the logits. again: makes the same run over the same cache without the first call's leftovers, such as a
    graph, for other kernels."""

    timed: Call
    launched: Call
    again: "Callable[[], Run]"


def prefill(model: Model, count: int, tokens: int, chunk: int) -> Run:
    """Prefill `count` prompts of `tokens` tokens each in passes over `chunk` tokens. As in engines, a full pass cuts a
    prompt."""
    device = next(model.parameters()).device
    each = -(-tokens // model.page_size)
    cache = model.make_cache(count * each, device=device, state_slots=count)
    prompts = torch.arange(count * tokens, device=device) % model.config.vocab_size

    @torch.inference_mode()
    def run() -> torch.Tensor:
        for begin in range(0, count * tokens, chunk):
            end = min(begin + chunk, count * tokens)
            chunks = [_chunk(i, tokens, each, begin, end) for i in range(begin // tokens, -(-end // tokens))]
            logits = model(prompts[begin:end], prefill_batch(chunks, cache.page_size, device), cache)
        return logits

    def made() -> Run:
        return Run(run, run, made)

    return made()


def _chunk(prompt: int, tokens: int, pages: int, begin: int, end: int) -> Chunk:
    """Return the part of a prompt in a pass over the tokens from `begin` to `end` of the concatenated prompts."""
    first = prompt * tokens
    cached, until = max(begin - first, 0), min(end - first, tokens)
    return Chunk(until - cached, cached, range(prompt * pages, (prompt + 1) * pages), prompt)


def decode(model: Model, count: int, context: int) -> Run:
    """Decode a token for each of `count` sequences of `context` tokens, as a graph. The caches hold random numbers."""
    device = next(model.parameters()).device
    each = -(-context // model.page_size)
    cache = model.make_cache(count * each + SPARE, device=device, state_slots=count + SPARE)
    fill(cache)
    allocate = cache.allocator.allocate
    sequences = [Cached(allocate(each), state_slot, context) for state_slot in cache.state_slots.allocate(count)]

    def made() -> Run:
        graph, python = (DecodeStep(model, cache, capture=capture) for capture in (True, False))
        return Run(lambda: graph(sequences), lambda: python(sequences), made)

    return made()


@torch.inference_mode()
def fill(cache: Cache) -> None:
    """Fill a cache with normal numbers, in the layers' format.

    The numbers decide which keys are selected, and the time of a selection depends on the distribution of the scores.
    Normal keys give a prompt's distribution without ties; keys with few bit patterns would give many ties.
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
