"""GPU time by part of a model: indexer, top-k, attention, MoE and the rest.

While a profiler runs, modules and ops open named ranges on the host; a kernel belongs to the innermost range around its
launch. Times are only of kernels, without the gaps between them, and a kernel's starts where the previous one ends
(`trace.in_turn`). The products that an indexer shares with its attention layer count as attention; a selection in one
launch with its scores counts as indexer, not as top-k.
"""

import contextlib
import functools
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.profiler import record_function

import dsa
from dsa_bench.e2e.trace import events_of, in_turn
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.compressed_attention import CompressedAttention
from dsa_layers.layers.compressed_indexer import CompressedIndexer
from dsa_layers.layers.indexer import LightningIndexer
from dsa_layers.layers.moe import MoE

REST = "rest"
GLUE = "glue"  # of passes on the peers' kernels, not in PARTS
PARTS = ("indexer", "top-k", "attention", "MoE", REST)
MODULES = {
    DSAAttention: "attention",
    CompressedAttention: "attention",
    MoE: "MoE",
}
_PREFIX = "part: "


def glue() -> AbstractContextManager[None]:
    """A range around work that is needed only to hand our tensors to the peers' kernels."""
    return record_function(_PREFIX + GLUE)


def gpu_ms(model: nn.Module, call: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of the GPU by part in one call, which must run as Python, not as a captured graph."""
    with _announced(model):
        return by_part(events_of(call))


def by_part(events: list[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds of kernels by part, from the events of a Chrome trace: `user_annotation` ranges on the host,
    launches (`cuda_runtime`, `cuda_driver`) and `kernel`s that share a launch's correlation."""
    ranges = sorted(
        (e["ts"], e["ts"] + e["dur"], e["name"].removeprefix(_PREFIX))
        for e in events
        if e.get("cat") == "user_annotation" and e["name"].startswith(_PREFIX)
    )
    starts = [start for start, _, _ in ranges]
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    total = dict.fromkeys(PARTS, 0.0)
    for event, us in in_turn(events):
        ts = launched.get(event["args"]["correlation"])
        if ts is None:
            raise ValueError(f"{event['name']}: the trace has no launch of this kernel")
        # Ranges are nested: the last one that began before and has not ended is the innermost.
        around = (name for _, end, name in reversed(ranges[: bisect_right(starts, ts)]) if ts <= end)
        part = next(around, REST)
        total[part] = total.get(part, 0.0) + us / 1000
    return total


@contextlib.contextmanager
def _announced(model: nn.Module) -> Iterator[None]:
    """Within the block modules and the selection open ranges."""

    def announced(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def announced_call(*arguments: Any, **options: Any) -> Any:
            with record_function(_PREFIX + part):
                return call(*arguments, **options)

        return announced_call

    topk_indices = dsa.topk_indices
    indexers = [module for module in model.modules() if isinstance(module, LightningIndexer | CompressedIndexer)]
    for indexer in indexers:
        indexer.select = announced("indexer", indexer.select)
    # No hooks: a module with hooks takes no casts.
    forwards = {kind: kind.forward for kind in MODULES}
    for kind, part in MODULES.items():
        kind.forward = announced(part, forwards[kind])
    dsa.topk_indices = announced("top-k", topk_indices)
    try:
        yield
    finally:
        dsa.topk_indices = topk_indices
        for indexer in indexers:
            del indexer.select
        for kind, forward in forwards.items():
            kind.forward = forward
