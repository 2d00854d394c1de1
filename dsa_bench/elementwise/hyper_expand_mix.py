"""Expansion and projection in one kernel, compared with tile-kernels' expansion followed by DeepGEMM's projection,
which leaves partial sums, and with our two separate kernels."""

import torch

import dsa
from dsa_bench.elementwise.hyper_mix import OUTPUTS, matrix
from dsa_bench.harness.agreement import agree
from dsa_bench.harness.calls import over
from dsa_bench.harness.case import Case, bytes_rate, fresh
from dsa_bench.peers import hyper_connections as peers

# tokens, channels of a stream; more than 4 tokens are the two kernels
SHAPES = [(tokens, d) for d in (4096, 7168) for tokens in (4096, 128, 32, 8, 4, 2, 1)]
PROBED = [(128, 4096)]


def _apart(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    *rest, parts = given
    new = dsa.hyper_expand(*rest)
    return new, dsa.hyper_mix(new, parts)


def _agree(theirs: tuple[torch.Tensor, torch.Tensor], ours: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Their second tensor is partial sums."""
    new, products = theirs
    agree((new, products.sum(0)), ours)


def case(tokens: int, d: int) -> Case:
    def one() -> tuple[torch.Tensor, ...]:
        y, streams = (torch.randn(tokens, *s, d, device="cuda").bfloat16() for s in ((), (4,)))
        post, comb = (torch.rand(tokens, *s, device="cuda") for s in ((4,), (4, 4)))
        return y, streams, post, comb, torch.randn(3, OUTPUTS, 4 * d, device="cuda").bfloat16()

    size = 2 * d * (9 * tokens + 3 * 4 * OUTPUTS) + 4 * tokens * (20 + OUTPUTS)
    inputs = fresh(size, one)
    found = peers.expand_and_project((*rest, matrix(parts)) for *rest, parts in inputs)
    calls = over(inputs, {"dsa": dsa.hyper_expand_mix, "apart": _apart})
    options = {"graph": True, "yardsticks": frozenset({"apart"}), "agree": _agree}
    return Case(f"{tokens} tokens, D {d}", calls, bytes_rate(size), found, **options)
