"""Expansion and projection in one kernel, against tile-kernels' expansion with DeepGEMM's projection, which leaves
partial sums, and against our two separate kernels."""

from functools import cache, partial

import torch

import dsa
from dsa.testing import copy_bandwidth
from dsa_bench.elementwise.hyper_mix import OUTPUTS, matrix
from dsa_bench.harness.agreement import agree
from dsa_bench.harness.case import Case
from dsa_bench.peers import hyper_connections as peers

# tokens, channels of a stream; more than 4 tokens are the two kernels
SHAPES = [(tokens, d) for d in (4096, 7168) for tokens in (4096, 128, 32, 8, 4, 2, 1)]
PROBED = [(128, 4096)]
_FRESH_BYTES = 400e6  # of inputs in a graph: more than the L2 cache holds
_ceiling = cache(copy_bandwidth)


def _apart(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    *rest, parts = given
    new = dsa.hyper_expand(*rest)
    return new, dsa.hyper_mix(new, parts)


def _agree(theirs: tuple[torch.Tensor, torch.Tensor], ours: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Their second tensor is partial sums."""
    new, products = theirs
    agree((new, products.sum(0)), ours)


def case(tokens: int, d: int) -> Case:
    size = 2 * d * (9 * tokens + 3 * 4 * OUTPUTS) + 4 * tokens * (20 + OUTPUTS)
    inputs = [
        (
            *(torch.randn(tokens, *s, d, device="cuda").bfloat16() for s in ((), (4,))),
            *(torch.rand(tokens, *s, device="cuda") for s in ((4,), (4, 4))),
            torch.randn(3, OUTPUTS, 4 * d, device="cuda").bfloat16(),
        )
        for _ in range(min(64, max(2, int(_FRESH_BYTES / size))))
    ]
    found = peers.expand_and_project((*rest, matrix(parts)) for *rest, parts in inputs)

    def figure(ms: float) -> str:
        rate = size / (ms * 1e-3)
        return f"{ms * 1e3:.1f} us, {rate / 1e9:.0f} GB/s, {rate / _ceiling():.0%} of copy"

    def check(got: tuple[torch.Tensor, torch.Tensor]) -> None:
        assert all(torch.equal(g, e) for g, e in zip(got, _apart(*inputs[0]), strict=True))

    calls = {
        "dsa": [partial(dsa.hyper_expand_mix, *i) for i in inputs],
        "apart": [partial(_apart, *i) for i in inputs],
        **found.calls,
    }
    options = {"yardsticks": frozenset({"apart"}), "failed": found.failed, "agree": _agree}
    return Case(f"{tokens} tokens, D {d}", calls, figure, check, graph=True, **options)
