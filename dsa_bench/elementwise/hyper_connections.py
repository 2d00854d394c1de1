"""The hyper-connections' kernels beside the formulas in PyTorch."""

from functools import cache, partial

import torch

import dsa
from dsa import reference
from dsa.testing import copy_bandwidth
from dsa_bench.harness.case import Call, Case

# op, tokens, channels of a stream
SHAPES = [(op, tokens, d) for d in (4096, 7168) for tokens in (16384, 4096, 128, 1) for op in ("collapse", "expand")]
SHAPES += [("head", tokens, 4096) for tokens in (128, 1)]
_FRESH_BYTES = 400e6  # of inputs in a graph: more than the L2 cache holds
_ceiling = cache(copy_bandwidth)


def _calls(op: str, tokens: int, d: int) -> tuple[Call, Call]:
    streams = torch.randn(tokens, 4, d, device="cuda", dtype=torch.bfloat16)
    if op == "collapse":
        inputs = (streams, *(torch.randn(*s, device="cuda") for s in ((tokens, 24), (24,), (3,))))
        return partial(dsa.hyper_collapse, *inputs), partial(reference.hyper_collapse, *inputs)
    if op == "head":
        inputs = (streams, *(torch.randn(*s, device="cuda") for s in ((tokens, 4), (4,), (1,))))
        return partial(dsa.hyper_head, *inputs), partial(reference.hyper_head, *inputs)
    y = torch.randn(tokens, d, device="cuda", dtype=torch.bfloat16)
    inputs = (y, streams, *(torch.rand(tokens, *s, device="cuda") for s in ((4,), (4, 4))))
    return partial(dsa.hyper_expand, *inputs), partial(reference.hyper_expand, *inputs)


def case(op: str, tokens: int, d: int) -> Case:
    rows, numbers = {"collapse": (5, 24 + 20), "expand": (9, 20), "head": (5, 4)}[op]  # read and written
    size = tokens * (2 * d * rows + 4 * numbers)
    count = min(64, max(2, int(_FRESH_BYTES / size)))
    ours, torchs = map(list, zip(*(_calls(op, tokens, d) for _ in range(count))))

    def figure(ms: float) -> str:
        rate = size / (ms * 1e-3)
        return f"{ms * 1e3:.1f} us, {rate / 1e9:.0f} GB/s, {rate / _ceiling():.0%} of copy"

    calls, baselines = {"dsa": ours, "torch": torchs}, frozenset({"torch"})
    return Case(f"{op} of {tokens} tokens, D {d}, bf16", calls, figure, graph=True, baselines=baselines)
