"""GPU time by part of a model: indexer, top-k, attention, MoE and the rest.

While a profiler runs, modules and ops open named ranges on the host. A kernel belongs to the innermost range around its
launch. Only kernels count, not the gaps between them, and a kernel's time starts when the previous kernel ends
(`trace.in_turn`). The products that an indexer shares with its attention layer count as attention. A selection fused
with its scores counts as indexer, not as top-k.
"""

import functools
from bisect import bisect_right
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.profiler import record_function

import dsa
from dsa_bench.e2e.replacing import replaced
from dsa_bench.e2e.trace import events_of, in_turn
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.compressed_attention import CompressedAttention
from dsa_layers.layers.compressed_indexer import CompressedIndexer
from dsa_layers.layers.indexer import LightningIndexer
from dsa_layers.layers.moe import MoE

REST = "rest"
GLUE = "glue"  # only in passes with the peers' kernels, so not in PARTS
PARTS = ("indexer", "top-k", "attention", "MoE", REST)
MODULES = {
    DSAAttention: "attention",
    CompressedAttention: "attention",
    MoE: "MoE",
}
_PREFIX = "part: "


def glue() -> AbstractContextManager[None]:
    """Open a range around work that only converts our tensors for the peers' kernels."""
    return record_function(_PREFIX + GLUE)


def gpu_ms(model: nn.Module, call: Callable[[], object]) -> dict[str, float]:
    """Return GPU milliseconds by part of one call, which must launch from Python, not replay a graph."""
    with _announced(model):
        return by_part(events_of(call))


def by_part(events: list[dict[str, Any]]) -> dict[str, float]:
    """Return milliseconds of kernels by part, from the events of a Chrome trace.

    The events are `user_annotation` ranges on the host, launches (`cuda_runtime`, `cuda_driver`), and `kernel`s with
    the correlation of their launch.
    """
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
        # Ranges are nested: the last range that began before the launch and has not ended is the innermost.
        part = next((name for _, end, name in reversed(ranges[: bisect_right(starts, ts)]) if ts <= end), REST)
        total[part] = total.get(part, 0.0) + us / 1000
    return total


def _announced(model: nn.Module) -> AbstractContextManager[None]:
    """Within the block, modules and the selection open ranges."""

    def announced(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def announced_call(*arguments: Any, **options: Any) -> Any:
            with record_function(_PREFIX + part):
                return call(*arguments, **options)

        return announced_call

    indexers = [module for module in model.modules() if isinstance(module, LightningIndexer | CompressedIndexer)]
    selects = [(indexer, "select", announced("indexer", indexer.select)) for indexer in indexers]
    # No hooks: a module with hooks takes no casts.
    forwards = [(kind, "forward", announced(part, kind.forward)) for kind, part in MODULES.items()]
    return replaced([*selects, *forwards, (dsa, "topk_indices", announced("top-k", dsa.topk_indices))])
