"""Check that every layer's indexer selects keys that are planted among many others.

Before a layer computes index scores, `planted` overwrites some keys with keys in the direction of the first query. All
other keys are random and have about the same norm. `planted` looks at the first query of each call: it counts the
planted keys that were not selected, and compares index scores with scores in float64.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

import dsa
from dsa_layers.batch.sequence_batch import Chunk, prefill_batch
from dsa_layers.cache.kv_cache import Cache
from dsa_layers.generation.steps import DecodeStep
from dsa_layers.models.protocols import Model

SAMPLES = 2048  # random keys whose scores are compared in addition to those of the planted keys


class Haystack:
    """A cache with one sequence of `context` tokens. Its index keys are Gaussian with scales of 1. All other bytes are
    random, from 0x28 to 0x37: small positive numbers in e4m3, bf16 and fp32."""

    def __init__(self, model: Model, context: int, device: torch.device | str) -> None:
        self._model, self.context, self._device = model, context, device
        count = -(-context // model.page_size)
        # `pages` has the sequence's pages in random order. DecodeStep allocates a page for padding before them.
        self.cache: Cache = model.make_cache(count + 2, device=device, state_slots=4)
        for tensor in self.cache.tensors():
            tensor.view(torch.uint8).random_(0x28, 0x38)
        for layer in range(model.config.num_hidden_layers):
            for pages in _index_pages(self.cache.layer(layer)):
                _fill(pages)
        self.padding = DecodeStep(model, self.cache, capture=False)
        pages = self.cache.allocator.allocate(count)
        self.pages = [pages[i] for i in torch.randperm(count).tolist()]

    def prefill(self, new: int) -> None:
        batch = prefill_batch(
            [Chunk(new, self.context - new, self.pages, 3)], self.cache.page_size, torch.device(self._device)
        )
        with torch.inference_mode():
            self._model(torch.arange(new, device=self._device) % self._model.config.vocab_size, batch, self.cache)

    def decode(self) -> None:
        self.padding([_Sequence(self.context, self.pages)])


class _Sequence:
    def __init__(self, context: int, pages: Sequence[int]) -> None:
        self.tokens, self.drafts, self.pages, self.state_slot = [1] * context, (), pages, 3


class Finds:
    """selections: the number of checked calls that select keys. lacking: the number of planted keys that were not
    selected. error: the largest error of a score, divided by the root mean square of the call's exact scores."""

    def __init__(self) -> None:
        self.selections = self.lacking = 0
        self.error = 0.0


@contextmanager
def planted(shares: Sequence[float]) -> Iterator[Finds]:
    """In the block, plant keys in every layer. The ops of dsa that score or select keys are replaced. Yield a `Finds`.

    shares: positions among the keys that the first query can select, from 0 (first) to 1 (last).
    """
    finds, pending = Finds(), []
    names = ("fp8_mqa_logits", "fp8_paged_mqa_logits", "topk_indices", "indexer_select")
    ours = {name: getattr(dsa, name) for name in names}
    packed, paged, select, select_packed = ours.values()

    def plant_in_rows(q, keys, weights, starts, ends):
        """Plant keys. -> (positions of the planted keys in the first query's range, the range's length, exact).
        exact(positions) returns the first query's float64 scores."""
        first, count = int(starts[0]), int(ends[0] - starts[0])
        places, codes = _places(shares, count, q.device), keys[0].view(torch.uint8)
        codes[first + places] = _needles(q[0], weights[0], len(places)).view(torch.uint8)
        keys[1][first + places] = 1.0
        return places, count, lambda at: _exact(q[0], codes[first + at], keys[1][first + at], weights[0])

    def of_packed(q, keys, weights, starts, ends, **options):
        places, count, exact = plant_in_rows(q, keys, weights, starts, ends)
        scores = packed(q, keys, weights, starts, ends, **options)
        sampled = _sampled(places, count)
        _compare(finds, scores[0, sampled], exact(sampled))
        pending.append(places)
        return scores

    def of_selected_rows(q, keys, weights, starts, ends, k, *, accumulators, **paging):
        places, _, exact = plant_in_rows(q, keys, weights, starts, ends)
        arguments = q, keys, weights, starts, ends, k
        positions, values = select_packed(*arguments, accumulators=accumulators, return_values=True)
        selected = positions[0, positions[0] >= 0].long()
        _compare(finds, values[0, : len(selected)], exact(selected))
        pending.append(places)
        return found(select_packed(*arguments, accumulators=accumulators, **paging), **paging)

    def plant_in_pages(q, pages, weights, lengths, block_table):
        count, size, (keys, scales) = int(lengths.flatten()[0]), pages.shape[1], _views(pages)
        places = _places(shares, count, q.device)
        at = block_table[0, places // size].long(), places % size
        keys[at] = _needles(q[0, 0], weights[0], len(places)).view(torch.uint8)
        scales[at] = 1.0

        def exact(places):
            at = block_table[0, places // size].long(), places % size
            return _exact(q[0, 0], keys[at], scales[at], weights[0])

        return places, count, exact

    def of_pages(q, pages, weights, lengths, block_table, schedule, most, **options):
        places, count, exact = plant_in_pages(q, pages, weights, lengths, block_table)
        scores = paged(q, pages, weights, lengths, block_table, schedule, most, **options)
        sampled = _sampled(places, count)
        _compare(finds, scores[0, sampled], exact(sampled))
        pending.append(places)
        return scores

    def of_selection(scores, k, **options):
        return found(select(scores, k, **options), **options)

    def found(selected, block_table=None, page_size=None, **_):
        """Count the planted keys that are missing in the first query's selection. With a block table, `selected` has
        slots in the cache instead of positions."""
        places = pending.pop()
        if block_table is not None:
            places = block_table[0, places // page_size].long() * page_size + places % page_size
        finds.selections += 1
        finds.lacking += len(places) - int(torch.isin(places, selected[0].long()).sum())
        return selected

    for name, op in zip(names, (of_packed, of_pages, of_selection, of_selected_rows)):
        setattr(dsa, name, op)
    try:
        yield finds
    finally:
        for name, op in ours.items():
            setattr(dsa, name, op)


def _places(shares: Sequence[float], count: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(sorted({min(int(share * count), count - 1) for share in shares}), device=device)


def _sampled(places: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cat((places, torch.randint(count, (SAMPLES,), device=places.device)))


def _needles(q: torch.Tensor, weights: torch.Tensor, count: int) -> torch.Tensor:
    """Return `count` equal e4m3 keys [count, dim] in the direction of sum_h max(weights[h], 0) q[h]. Their norm is
    sqrt(dim), about the norm of a Gaussian key."""
    towards = (weights.float().clamp(min=0)[:, None] * q.float()).sum(0)
    return (towards / towards.norm() * len(towards) ** 0.5).to(torch.float8_e4m3fn).repeat(count, 1)


def _exact(q: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the float64 scores [n] of one query [heads, dim]. keys: bytes of e4m3 [n, dim]."""
    products = (keys.view(torch.float8_e4m3fn).double() @ q.double().T).clamp(min=0)
    return (products * weights.double()).sum(-1) * scales.double()


def _compare(finds: Finds, scores: torch.Tensor, exact: torch.Tensor) -> None:
    error = (scores.double() - exact).abs().max() / exact.square().mean().sqrt()
    finds.error = max(finds.error, float(error))


def _index_pages(layer: object) -> list[torch.Tensor]:
    entries = getattr(layer, "index_entries", None)
    pages = getattr(layer, "index", None) if entries is None else entries.pages
    return [] if pages is None else [pages]


def _views(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views (e4m3 keys as bytes [pages, P, dim], fp32 scales [pages, P]) of index pages [pages, P, 1, dim + 4].
    In a page, all keys precede all scales."""
    count, size, _, width = pages.shape
    rows = pages.view(count, size * width)
    keys, scales = rows[:, : size * (width - 4)], rows[:, size * (width - 4) :]
    return keys.unflatten(1, (size, width - 4)), scales.view(torch.float32)


def _fill(pages: torch.Tensor) -> None:
    keys, scales = _views(pages)
    for some, own in zip(keys.split(4096), scales.split(4096)):
        some.copy_(torch.randn(some.shape, device=pages.device).to(torch.float8_e4m3fn).view(torch.uint8))
        own.fill_(1.0)
