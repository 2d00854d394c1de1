"""Time and bytes of all layers of a published model, computed from its stack at three depths.

The bytes are those that a decoding pass reads: the caches and the weights, without the weights of experts that have no
tokens.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import dsa
from dsa_bench.e2e.replacing import replaced
from dsa_bench.e2e.stacks import STACKS
from dsa_layers.layers.experts import Experts
from dsa_layers.models.family import published_config
from dsa_layers.models.protocols import CheckpointModel

# The ops that sort a pass's tokens by expert. Their last result has the end of each expert's rows.
SORTING = ("route_by_table", "route_to_experts", "sort_by_expert")
LOOKED_UP = "tid2eid"  # V4's table of each token's experts; a token reads one row


def depths(model: CheckpointModel) -> tuple[int, int, int]:
    return 0, 1, len(layers_of(model))


def full_depth(name: str, ends: float, first: float, whole: float) -> float:
    """Return the milliseconds or bytes of all N published layers, ends + F * (first - ends) + (N - F) * (whole - first)
    / (n - 1).

    ends, first, whole: the figures of the stack without layers, with only its first layer, and with all its n layers. F
    published layers have the kind of the stack's first layer: no experts (V3.2, GLM-5), or windows only (V4). Each of
    the other N - F layers counts as the mean of the stack's other layers. These have one kind, or in V4 two kinds in
    equal parts, like the published layers.
    """
    file, fields = STACKS[name]
    published = published_config(file)
    layers = published["num_hidden_layers"]
    ratios = published.get("compress_ratios")
    alike = ratios[:layers].count(0) if ratios else published["first_k_dense_replace"]
    rest = (whole - first) / (fields["num_hidden_layers"] - 1)
    return ends + alike * (first - ends) + (layers - alike) * rest


@contextmanager
def first_layers(model: CheckpointModel, count: int) -> Iterator[None]:
    """Within the block, the model has only its first `count` layers. Make caches before the block: a cache made within
    the block has parts only for these layers."""
    layers = layers_of(model)
    left_out = list(layers)[count:]
    del layers[count:]
    last = layers[-1] if layers else None
    following = getattr(last, "following", ())
    if following:  # the last block's result is not for the next one
        last.following = ()
    try:
        yield
    finally:
        layers.extend(left_out)
        if following:
            last.following = following


def layers_of(model: CheckpointModel) -> nn.ModuleList:
    """Return the model's layers, without those of its drafter."""
    (found,) = (module for name, module in model.named_modules() if name in ("layers", "model.layers"))
    return found


@contextmanager
def experts_touched() -> Iterator[list[torch.Tensor]]:
    """Yield a list to which each MoE layer that runs within the block appends the number of experts with tokens."""
    found: list[torch.Tensor] = []

    def recording(op: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(op)
        def recording_op(*arguments: Any, **options: Any) -> Any:
            results = op(*arguments, **options)
            ends = results[-1]
            found.append(ends.diff(prepend=ends.new_zeros(1)).count_nonzero())
            return results

        return recording_op

    with replaced([(dsa, name, recording(getattr(dsa, name))) for name in SORTING]):
        yield found


def pass_bytes(model: CheckpointModel, touched: Sequence[int], cached: Sequence[int]) -> float:
    """Return the bytes that a pass reads with the model's current layers, without its drafter.

    touched: the number of experts with tokens, per MoE layer. cached: bytes of the sequences in each layer's cache; all
    count as read. Both lists can have further entries, for layers that `first_layers` leaves out. Activations do not
    count. Embeddings do not count either, because a token reads only one row.
    """
    found = float(sum(cached[: len(layers_of(model))]))
    counts = iter(touched)
    for name, module in model.named_modules():
        if name.startswith("drafter") or isinstance(module, torch.nn.Embedding):
            continue
        held = sum(tensor.nbytes for key, tensor in module.named_parameters(recurse=False) if key != LOOKED_UP)
        found += held * next(counts) / module.count if isinstance(module, Experts) else held
    return found


def cached_bytes(model: CheckpointModel, count: int, context: int) -> list[int]:
    cache = model.make_cache(count * -(-context // model.page_size), device="meta", state_slots=count)
    return [_held(cache.layer(i)) for i in range(len(layers_of(model)))]


def _held(part: Any) -> int:
    if isinstance(part, torch.Tensor):
        return part.nbytes
    return 0 if part is None else sum(map(_held, vars(part).values()))
