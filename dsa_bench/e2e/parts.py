"""GPU time by part of a model (indexer, top-k, attention, MoE and the rest), and the share of collectives.

While a profiler runs, modules and `dsa.topk_indices` open named ranges on the host (`_announced`). A kernel belongs to
the innermost range around its launch. Kernels, copies and fills count, gaps do not. The time of a kernel, copy or fill
starts when all earlier work has ended (`in_turn`). The products that an indexer shares with its attention layer count
as attention. A selection fused with its scores counts as indexer, not as top-k.
"""

import functools
import json
import re
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import dsa
from dsa_bench.e2e.replacing import replaced
from dsa_layers.engine.fused_moe import FusedMoE
from dsa_layers.engine.paged_attention import PagedAttention
from dsa_layers.engine.paged_compressed_attention import PagedCompressedAttention
from dsa_layers.layers.compressor import CompressedIndexer
from dsa_layers.layers.indexer import LightningIndexer

REST = "rest"
GLUE = "glue"  # only in passes with the peers' kernels, so not in PARTS
PARTS = ("indexer", "top-k", "attention", "MoE", REST)
MODULES = {
    PagedAttention: "attention",
    PagedCompressedAttention: "attention",
    FusedMoE: "MoE",
}
_PREFIX = "part: "
# NCCL kernels, sums over symmetric memory, copies between GPUs, and waits for copies of other GPUs.
COLLECTIVES = re.compile(r"\bnccl|one_shot_sum_sm90|experts_sum_sm90|wait_signal|Memcpy PtoP")
GPU_WORK = ("kernel", "gpu_memset", "gpu_memcpy")  # categories of events on the GPU

Event = dict[str, Any]


def glue() -> AbstractContextManager[None]:
    """Open a range for work that only converts our tensors to layouts of the peers' kernels."""
    return record_function(_PREFIX + GLUE)


def gpu_ms(model: nn.Module, call: Callable[[], object]) -> dict[str, float]:
    """Return {part: GPU milliseconds} of one call, which must launch its kernels from Python, not replay a graph."""
    with _announced(model):
        return by_part(events_of(call))


def by_part(events: list[dict[str, Any]]) -> dict[str, float]:
    """Return {part: GPU milliseconds} from the events of a Chrome trace. A kernel, copy or fill has the correlation id
    of the launch."""
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
    """Within the block, calls of attention and MoE layers, of the indexers' `select` and `pick`, and of
    `dsa.topk_indices` open ranges."""

    def announced(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def announced_call(*arguments: Any, **options: Any) -> Any:
            with record_function(_PREFIX + part):
                return call(*arguments, **options)

        return announced_call

    indexers = [module for module in model.modules() if isinstance(module, LightningIndexer | CompressedIndexer)]
    names = [(indexer, name) for indexer in indexers for name in ("select", "pick") if hasattr(indexer, name)]
    selects = [(indexer, name, announced("indexer", getattr(indexer, name))) for indexer, name in names]
    forwards = [(kind, "forward", announced(part, kind.forward)) for kind, part in MODULES.items()]
    return replaced([*selects, *forwards, (dsa, "topk_indices", announced("top-k", dsa.topk_indices))])


def in_turn(events: Sequence[Event]) -> Iterator[tuple[Event, float]]:
    """Yield the GPU's work in order of its start, each event with the microseconds that it runs after all earlier work
    has ended. Gaps do not count.

    With programmatic dependent launch a kernel starts before the previous kernel has ended, and waits for it. Time in
    which several events run counts once.
    """
    end = float("-inf")
    for event in sorted((event for event in events if event.get("cat") in GPU_WORK), key=lambda event: event["ts"]):
        event_end = event["ts"] + event["dur"]
        yield event, max(event_end - max(event["ts"], end), 0)
        end = max(end, event_end)


def events_of(call: Callable[[], object], *, host: bool = True) -> list[Event]:
    """Profile a call. host: also record the host's operators and ranges, which are most of the events of a long
    pass."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if host else [ProfilerActivity.CUDA]
    with profile(activities=activities) as recorded:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        recorded.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def collectives_share(events: Sequence[Event]) -> float:
    """Return the fraction of a GPU's time in which it receives data from other GPUs or waits for them.

    This is the time in which only collectives run, over the time in which any kernel, copy or fill runs. Only work
    after the first collective counts, because this collective makes the ranks start together (`Clock.align`). A
    collective that waits for another rank counts as running. Raises ValueError if no work follows the first collective.
    """
    work = list(in_turn(events))
    begin = next((i + 1 for i, (event, _) in enumerate(work) if _is_collective(event)), len(work))
    whole = sum(us for _, us in work[begin:])
    if not whole:
        raise ValueError(f"events: must have kernels after a collective, got {len(work)} in {len(events)} events")
    # The time in which work other than collectives runs. The first collective stays in this list, because other work
    # counts only after its end; [1:] then leaves out its time.
    others = [work[begin - 1][0], *(event for event, _ in work[begin:] if not _is_collective(event))]
    computing = sum(us for _, us in list(in_turn(others))[1:])
    return (whole - computing) / whole


def _is_collective(event: Event) -> bool:
    return COLLECTIVES.search(event["name"]) is not None
