"""Index scores over pages and selection as engines decode: DeepGEMM's scores, their plan made beforehand, and another
library's top-k of them."""

from collections.abc import Iterable
from functools import partial
from types import ModuleType

import torch

from dsa_bench.harness.calls import Call, Peers
from dsa_bench.peers import deep_gemm, topk


def select(inputs: Iterable[tuple], k: int) -> Peers:
    """Indices [B next_n, k], in any order, of (q, pages, weights, lengths [B], block_table, columns)."""
    inputs, peers = list(inputs), Peers()
    q = inputs[0][0]
    of_scores = deep_gemm.paged_mqa_logits(inputs)
    peers.failed |= {name: why for name, why in of_scores.failed.items() if name == deep_gemm.NEW.name}
    scores = of_scores.calls.get(deep_gemm.NEW.name)
    if scores is None:
        return peers
    pairs = [(one, deep_gemm.visible_keys(given[3], q.shape[1]).flatten()) for one, given in zip(scores, inputs)]
    for name, (library, make) in topk.those_for(q.shape[0] * q.shape[1], k).items():
        peers |= Peers.of({library: partial(_both, make, k)}, pairs, f"{deep_gemm.NEW.name}, {name}")
    return peers


def _both(make: topk.Make, k: int, module: ModuleType, scores: Call, lengths: torch.Tensor) -> Call:
    out, select = torch.empty(len(lengths), k, dtype=torch.int32, device=lengths.device), make(lengths)

    def call() -> torch.Tensor:
        select(scores(), lengths, out)
        return out

    return call
