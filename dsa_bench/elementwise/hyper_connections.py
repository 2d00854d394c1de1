"""The kernels of hyper-connections against tile-kernels and the formulas in PyTorch; also projection and collapse
together, against DeepGEMM's projection with tile-kernels' collapse."""

from functools import cache, partial

import torch

import dsa
from dsa import reference
from dsa.testing import copy_bandwidth
from dsa_bench.elementwise.hyper_mix import OUTPUTS, matrix, product
from dsa_bench.harness.case import Call, Case
from dsa_bench.peers import hyper_connections as peers
from dsa_bench.peers.package import Peers

# op, tokens, channels of a stream
SHAPES = [(op, tokens, d) for d in (4096, 7168) for tokens in (16384, 4096, 128, 1) for op in ("collapse", "expand")]
SHAPES += [("head", tokens, 4096) for tokens in (128, 1)]
SHAPES += [("mix and collapse", tokens, d) for d in (4096, 7168) for tokens in (16384, 4096, 128, 1)]
PROBED = [(op, 128, 4096) for op in ("collapse", "expand", "mix and collapse")]
_SIZES = {  # per token: rows of D bf16 channels and fp32 numbers that are read and written
    "collapse": (5, OUTPUTS + 20),
    "expand": (9, 20),
    "head": (5, 4),
    "mix and collapse": (9, 2 * OUTPUTS + 20),
}
_FRESH_BYTES = 400e6  # of inputs in a graph: more than the L2 cache holds
_ceiling = cache(copy_bandwidth)
Inputs = tuple[torch.Tensor, ...]


def _inputs(op: str, tokens: int, d: int) -> Inputs:
    streams = torch.randn(tokens, 4, d, device="cuda", dtype=torch.bfloat16)
    if op == "collapse":
        return streams, *(torch.randn(*s, device="cuda") for s in ((tokens, OUTPUTS), (OUTPUTS,), (3,)))
    if op == "head":
        return streams, *(torch.randn(*s, device="cuda") for s in ((tokens, 4), (4,), (1,)))
    if op == "mix and collapse":
        parts = torch.randn(3, OUTPUTS, 4 * d, device="cuda") * (4 * d) ** -0.5
        return streams, parts.bfloat16(), *(torch.randn(*s, device="cuda") for s in ((OUTPUTS,), (3,)))
    y = torch.randn(tokens, d, device="cuda", dtype=torch.bfloat16)
    return y, streams, *(torch.rand(tokens, *s, device="cuda") for s in ((4,), (4, 4)))


def _calls(op: str, inputs: Inputs) -> tuple[Call, Call]:
    """Ours, and the formula in PyTorch."""
    if op == "mix and collapse":
        return partial(_mix_and_collapse, *inputs), partial(_product_and_collapse, *inputs)
    name = f"hyper_{op}"
    return partial(getattr(dsa, name), *inputs), partial(getattr(reference, name), *inputs)


def _mix_and_collapse(streams: torch.Tensor, parts: torch.Tensor, *rest: torch.Tensor) -> Inputs:
    return dsa.hyper_collapse(streams, dsa.hyper_mix(streams, parts), *rest)


def _product_and_collapse(streams: torch.Tensor, parts: torch.Tensor, *rest: torch.Tensor) -> Inputs:
    return reference.hyper_collapse(streams, product(streams, parts), *rest)


def _peers(op: str, inputs: list[Inputs]) -> Peers:
    if op == "head":
        return Peers()
    if op == "mix and collapse":
        return peers.project_and_collapse((x, matrix(parts), *rest) for x, parts, *rest in inputs)
    return peers.collapse(inputs) if op == "collapse" else peers.expand(inputs)


def case(op: str, tokens: int, d: int) -> Case:
    rows, numbers = _SIZES[op]
    size = tokens * (2 * d * rows + 4 * numbers)
    inputs = [_inputs(op, tokens, d) for _ in range(min(64, max(2, int(_FRESH_BYTES / size))))]
    ours, torchs = map(list, zip(*(_calls(op, one) for one in inputs)))
    found = _peers(op, inputs)

    def figure(ms: float) -> str:
        rate = size / (ms * 1e-3)
        return f"{ms * 1e3:.1f} us, {rate / 1e9:.0f} GB/s, {rate / _ceiling():.0%} of copy"

    calls, baselines = {"dsa": ours, "torch": torchs, **found.calls}, frozenset({"torch"})
    name = f"{op} of {tokens} tokens, D {d}, bf16"
    return Case(name, calls, figure, graph=True, baselines=baselines, failed=found.failed)
