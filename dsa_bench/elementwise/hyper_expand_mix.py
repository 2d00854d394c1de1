"""Expansion of the streams and projection of the new streams in one op, compared with our two separate ops, and with
tile-kernels' expansion followed by DeepGEMM's projection, which leaves partial sums over the channels."""

from collections.abc import Sequence

import torch

import dsa
from dsa_bench.elementwise.hyper_mix import OUTPUTS, matrix
from dsa_bench.harness.case import Case, Peers, agree, bf16, bytes_case
from dsa_bench.peers import hyper_connections as peers

# tokens, channels of a stream, and True for independent streams. Up to 4 tokens our op is one kernel; for more it runs
# the two separate kernels.
SHAPES = [(tokens, d) for d in (4096, 7168) for tokens in (4096, 128, 32, 8, 4, 2, 1)]
SHAPES += [(tokens, 2816, True) for tokens in (4096, 128, 4, 1)]
PROBED = [(128, 4096)]
Inputs = tuple[torch.Tensor, ...]


def _apart(*arguments: torch.Tensor) -> Inputs:
    *rest, parts = arguments
    new = dsa.hyper_expand(*rest)
    return new, dsa.hyper_mix(new, parts)


def case(tokens: int, d: int, independent: bool = False) -> Case:
    outputs = 8 if independent else OUTPUTS

    def inputs() -> Inputs:
        post, comb = (torch.rand(tokens, *s, device="cuda") for s in ((4,), (4, 4)))
        weights = post, None if independent else comb
        return bf16(tokens, d), bf16(tokens, 4, d), *weights, bf16(3, outputs, 4 * d)

    def of_peers(inputs: Sequence[Inputs]) -> Peers:
        return peers.expand_and_project((*rest, matrix(parts)) for *rest, parts in inputs)

    return bytes_case(
        f"{tokens} tokens, D {d}{', independent' if independent else ''}",
        2 * d * (9 * tokens + 3 * 4 * outputs) + 4 * tokens * ((4 if independent else 20) + outputs),
        inputs,
        {"dsa": dsa.hyper_expand_mix, "apart": _apart},
        None if independent else of_peers,
        yardsticks={"apart"},
        # The peer's second tensor contains partial sums.
        agree=lambda theirs, ours: agree((theirs[0], theirs[1].sum(0)), ours),
    )
