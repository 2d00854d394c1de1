"""Scores over pages and selection in one call, as in decoding: microseconds in a CUDA graph, compared with the peers'
two kernels.

Our call includes the plan of the scores. The peers' plans are made outside the timing, because a step's layers share
them. The peers do not say which of several equal scores they select.
"""

from functools import partial
from typing import Any

import torch

import dsa
from dsa_bench.harness.case import Case, agree_selected, bytes_rate, fresh
from dsa_bench.indexer.fp8_paged_mqa_logits import DIM, paged_inputs
from dsa_bench.peers import topk

# sequences, keys per sequence, queries per sequence, heads, k
SHAPES = [
    *((batch, keys, 1, 64, 2048) for keys in (131072, 32768, 4096) for batch in (1, 8, 32)),
    *((batch, 1 << 20, 1, 64, 2048) for batch in (1, 8)),
    *((batch, 131072, next_n, 64, 2048) for next_n in (2, 4) for batch in (1, 8)),
    *((batch, 32768, 1, 64, 512) for batch in (1, 8)),
]
PROBED = [(2, 4096, 1, 64, 2048), (2, 4096, 2, 64, 2048), (4, 4096, 4, 32, 512)]


def case(batch: int, keys: int, next_n: int, heads: int, k: int) -> Case:
    size = batch * keys * (DIM + 4)
    lengths = torch.full((batch,), keys, dtype=torch.int32)
    inputs = fresh(size, partial(paged_inputs, lengths, next_n, heads), most=128, total=128 << 20)

    def agree(theirs: Any, ours: torch.Tensor) -> None:
        """Compare with the positions of our keys, because the peers return positions, not slots."""
        agree_selected(theirs, dsa.paged_indexer_select(*inputs[0], keys, k), keys)

    return Case(
        f"{batch} x {keys}, next_n {next_n}, H {heads}, D {DIM}, k {k}",
        {"dsa": [partial(dsa.paged_indexer_select, *i, keys, k, slots=True) for i in inputs]},
        bytes_rate(size),
        topk.select_paged([(*i, keys) for i in inputs], k),
        graph=True,
        agree=agree,
    )
