"""The bytes that a decoding pass has to read: weights, of the experts those that its tokens go to, and caches."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import dsa
from dsa_bench.e2e.full_depth import layers_of
from dsa_layers.families.model import CheckpointModel
from dsa_layers.layers.embedding import Embedding
from dsa_layers.layers.experts import Experts

# The ops that sort a pass' tokens by expert: the last result of each says where an expert's rows end.
SORTING = ("route_by_table", "route_to_experts", "sort_by_expert")
LOOKED_UP = "tid2eid"  # V4's table, of which a token reads its row


@contextmanager
def experts_touched() -> Iterator[list[torch.Tensor]]:
    """How many experts get tokens, of each mixture that runs within the block, in their order."""
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
    """Of a pass of the layers that the model has now, without its drafter.

    touched: of each mixture of the model, how many experts get tokens; more than it has now may be there. cached: what
    the sequences have in each layer's cache, all of which counts as read.
    Embeddings are a row a token, and not counted; nor are activations.
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
    """What `count` sequences of `context` tokens have in each layer's cache."""
    pages = count * -(-context // model.page_size)
    cache = model.make_cache(pages, device="meta", state_slots=count)
    return [_held(cache.layer(i)) for i in range(len(layers_of(model)))]


def _held(part: Any) -> int:
    """Bytes of the tensors of a layer's cache."""
    if isinstance(part, torch.Tensor):
        return part.nbytes
    return 0 if part is None else sum(map(_held, vars(part).values()))
