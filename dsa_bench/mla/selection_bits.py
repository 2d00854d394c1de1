"""Selections written as bits, beside the same by plain torch operations: bytes read and written a second."""

from functools import cache, partial

import torch

import dsa
from dsa.reference.mla import selection_bits as reference
from dsa.testing import copy_bandwidth
from dsa_bench.harness.case import Case

# queries, indices of each, keys
SHAPES = [(8192, 2048, 8192), (4096, 2048, 131072), (2048, 512, 4096)]
_ceiling = cache(copy_bandwidth)


def case(queries: int, k: int, keys: int) -> Case:
    indices = torch.randint(0, keys, (queries, k), dtype=torch.int32, device="cuda")
    starts = torch.zeros(queries, dtype=torch.int32, device="cuda")
    arguments = indices, starts, keys
    size = 4 * queries * k + queries * keys // 8

    def figure(ms: float) -> str:
        rate = size / (ms * 1e-3)
        return f"{ms * 1e3:.1f} us, {rate / 1e9:.0f} GB/s, {rate / _ceiling():.0%} of copy"

    def check(got: torch.Tensor) -> None:
        some = slice(0, 256)
        if not torch.equal(got[some], reference.selection_bits(indices[some], starts[some], keys)):
            raise AssertionError("not the reference's bits")

    calls = {"dsa": [partial(dsa.selection_bits, *arguments)]}
    return Case(f"{queries} queries, {k} of {keys} keys", calls, figure, check, graph=True)
