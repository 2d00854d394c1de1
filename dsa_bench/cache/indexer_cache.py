"""Index keys between rows and cache pages: bytes a second against the copy bandwidth of the same run."""

from functools import cache, partial

import torch

import dsa
from dsa.testing import copy_bandwidth
from dsa_bench.harness.case import Case

# tokens; what
SHAPES = [(131072, "read"), (8192, "read"), (131072, "write"), (8192, "write")]
DIM = 128
_FRESH_BYTES = 400e6  # of inputs in a graph: more than the L2 cache holds
_ceiling = cache(copy_bandwidth)


def case(tokens: int, what: str) -> Case:
    size = tokens * (2 * (DIM + 4) + 8)
    calls = []
    for _ in range(min(64, max(2, int(_FRESH_BYTES / size)))):
        pages = torch.randint(0, 256, (tokens // 64, 64, 1, DIM + 4), dtype=torch.uint8, device="cuda")
        # As in a serving cache: pages in any order, the tokens of a page one after the other.
        order = torch.randperm(tokens // 64, device="cuda")
        slots = (order[:, None] * 64 + torch.arange(64, device="cuda")).view(-1)
        if what == "read":
            calls.append(partial(dsa.read_indexer_cache, pages, slots))
        else:
            k = torch.randn(tokens, DIM, device="cuda").to(torch.float8_e4m3fn)
            calls.append(partial(dsa.write_indexer_cache, k, torch.rand(tokens, device="cuda"), pages, slots))

    def figure(ms: float) -> str:
        rate = size / (ms * 1e-3)
        return f"{rate / 1e9:.0f} GB/s, {rate / _ceiling():.0%} of copy"

    return Case(f"{what} {tokens} tokens, D {DIM}", {"dsa": calls}, figure, graph=True)
