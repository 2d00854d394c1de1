"""Time and bytes of all layers of a published model, from its stack at three depths.

The bytes that a decoding pass reads are weights, of the experts those that its tokens go to, and caches.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

import dsa
from dsa_bench.e2e.stacks import STACKS
from dsa_layers.families.model import CheckpointModel
from dsa_layers.families.published import published_config
from dsa_layers.layers.embedding import Embedding
from dsa_layers.layers.experts import Experts

# The ops that sort a pass's tokens by expert; the last result of each is where an expert's rows end.
SORTING = ("route_by_table", "route_to_experts", "sort_by_expert")
LOOKED_UP = "tid2eid"  # V4's table, of which a token reads one row


class Depths(NamedTuple):
    """Of a stack without layers, with only its first one, and whole."""

    ends: float
    first: float
    whole: float


def depths(model: CheckpointModel) -> tuple[int, int, int]:
    """How many layers each has."""
    return 0, 1, len(layers_of(model))


def full_depth(name: str, found: Depths) -> float:
    """ends + F * (first - ends) + (N - F) * (whole - first) / (n - 1), of milliseconds or bytes.

    The first of a stack's n layers has the kind of the first F of the published model's N layers, which have no experts
    (V3.2, GLM-5) or attend only to windows (V4). All others count as the mean of the stack's others: these have one
    kind, in V4 two in equal parts, like the published ones.
    """
    file, fields = STACKS[name]
    published = published_config(file)
    layers, alike = published["num_hidden_layers"], _like_the_first(published)
    rest = (found.whole - found.first) / (fields["num_hidden_layers"] - 1)
    return found.ends + alike * (found.first - found.ends) + (layers - alike) * rest


def _like_the_first(published: dict) -> int:
    if "compress_ratios" in published:
        return published["compress_ratios"][: published["num_hidden_layers"]].count(0)
    return published["first_k_dense_replace"]


@contextmanager
def first_layers(model: CheckpointModel, count: int) -> Iterator[None]:
    """Within the block the model has only its first `count` layers. Caches must be made before."""
    layers = layers_of(model)
    left_out = list(layers)[count:]
    del layers[count:]
    try:
        yield
    finally:
        layers.extend(left_out)


def layers_of(model: CheckpointModel) -> nn.ModuleList:
    """The model's layers, without its drafter's."""
    (found,) = (module for name, module in model.named_modules() if name in ("layers", "model.layers"))
    return found


@contextmanager
def experts_touched() -> Iterator[list[torch.Tensor]]:
    """How many experts get tokens, for each mixture that runs within the block, in order."""
    found: list[torch.Tensor] = []
    ops = {name: getattr(dsa, name) for name in SORTING}

    def noted(op: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(op)
        def noted_op(*arguments: Any, **options: Any) -> Any:
            results = op(*arguments, **options)
            ends = results[-1]
            found.append(ends.diff(prepend=ends.new_zeros(1)).count_nonzero())
            return results

        return noted_op

    for name, op in ops.items():
        setattr(dsa, name, noted(op))
    try:
        yield found
    finally:
        for name, op in ops.items():
            setattr(dsa, name, op)


def pass_bytes(model: CheckpointModel, touched: Sequence[int], cached: Sequence[int]) -> float:
    """The bytes that a pass reads with the layers that the model has now, without its drafter.

    touched: how many experts get tokens, for each mixture of the whole model. cached: bytes of the sequences in each
    layer's cache, all of which count as read. Embeddings, a row per token, and activations are not counted.
    """
    found = float(sum(cached[: len(layers_of(model))]))
    counts = iter(touched)
    for name, module in model.named_modules():
        if name.startswith("drafter") or isinstance(module, Embedding):
            continue
        own = sum(tensor.nbytes for key, tensor in module.named_parameters(recurse=False) if key != LOOKED_UP)
        found += own * next(counts) / module.count if isinstance(module, Experts) else own
    return found


def cached_bytes(model: CheckpointModel, count: int, context: int) -> list[int]:
    """Bytes of `count` sequences of `context` tokens in each layer's cache."""
    pages = count * -(-context // model.page_size)
    cache = model.make_cache(pages, device="meta", state_slots=count)
    return [_held(cache.layer(i)) for i in range(len(layers_of(model)))]


def _held(part: Any) -> int:
    """Bytes of the tensors of a layer's cache."""
    if isinstance(part, torch.Tensor):
        return part.nbytes
    return 0 if part is None else sum(map(_held, vars(part).values()))
