"""Index scores and selection as in engines: DeepGEMM's scores followed by another library's top-k."""

from collections.abc import Iterable
from functools import partial
from types import ModuleType

import torch

from dsa_bench.harness.calls import Call, Peers
from dsa_bench.peers import deep_gemm, topk

SCORES = 4 << 30  # bytes of scores at a time; most engines have room for less


def select(q, kv, weights, starts, ends, k: int) -> Peers:
    """Indices [S, k] of all queries, in any order, from scores of a part of the queries at a time. starts must be 0."""
    peers, inputs = Peers(), [(q, kv, weights, starts, ends, k)]
    for name, (library, make) in topk.those_for(min(len(q), _queries(kv)), k).items():
        of_both = f"{deep_gemm.NEW.name}, {name}"
        peers |= Peers.of({deep_gemm.NEW: partial(_in_parts, make)}, inputs, of_both, needs=(library,))
    return peers


def _queries(kv) -> int:
    return max(1, SCORES // (4 * len(kv[0])))


def _in_parts(make: topk.Make, module: ModuleType, q, kv, weights, starts, ends, k: int) -> Call:
    out, size, select = torch.empty(len(q), k, dtype=torch.int32, device=q.device), _queries(kv), make(ends)
    parts = [slice(first, first + size) for first in range(0, len(q), size)]
    scores = [deep_gemm.new_mqa_logits(module, q[part], kv, weights[part], starts[part], ends[part]) for part in parts]

    def call() -> torch.Tensor:
        for part, of_part in zip(parts, scores):
            select(of_part(), ends[part], out[part])
        return out

    return call


def select_paged(inputs: Iterable[tuple], k: int) -> Peers:
    """Indices [B next_n, k], in any order, of (q, pages, weights, lengths [B], block_table, columns). The scores' plan
    is made outside the timing."""
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
