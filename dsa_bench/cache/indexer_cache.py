"""Copies of index keys between rows and cache pages: bytes per second and their share of the copy bandwidth."""

from functools import partial

import torch

import dsa
from dsa_bench.cache._pages import PAGE, shuffled_slots
from dsa_bench.harness.case import Call, Case, bytes_rate, e4m3, fresh

# tokens; direction: from pages to rows ("read") or from rows to pages
SHAPES = [(131072, "read"), (8192, "read"), (131072, "write"), (8192, "write")]
DIM = 128


def case(tokens: int, what: str) -> Case:
    def call() -> Call:
        pages = torch.randint(0, 256, (tokens // PAGE, PAGE, 1, DIM + 4), dtype=torch.uint8, device="cuda")
        slots = shuffled_slots(tokens)
        if what == "read":
            return partial(dsa.read_indexer_cache, pages, slots)
        return partial(dsa.write_indexer_cache, e4m3(tokens, DIM), torch.rand(tokens, device="cuda"), pages, slots)

    size = tokens * (2 * (DIM + 4) + 8)
    return Case(f"{what} {tokens} tokens, D {DIM}", {"dsa": fresh(size, call)}, bytes_rate(size, us=False), graph=True)
