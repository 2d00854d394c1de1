"""Selections converted from indices to bits: bytes read and written per second."""

from functools import partial

import torch

import dsa
from dsa_bench.harness.case import Case, bytes_rate

# queries, indices per query, keys
SHAPES = [(8192, 2048, 8192), (4096, 2048, 131072), (2048, 512, 4096)]


def case(queries: int, k: int, keys: int) -> Case:
    indices = torch.randint(0, keys, (queries, k), dtype=torch.int32, device="cuda")
    return Case(
        f"{queries} queries, {k} of {keys} keys",
        {"dsa": [partial(dsa.selection_bits, indices, torch.zeros(queries, dtype=torch.int32, device="cuda"), keys)]},
        bytes_rate(4 * queries * k + queries * keys // 8),
        graph=True,
    )
