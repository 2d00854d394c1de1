"""Index scores and selection as an engine runs them: DeepGEMM's scores of some queries at a time, and another
library's top-k of them, into the rows of one result."""

from functools import partial
from types import ModuleType

import torch

from dsa_bench.harness.calls import Call, Peers
from dsa_bench.peers import deep_gemm, topk

SCORES = 4 << 30  # bytes of scores at a time: no engine has room for more, and most have for less


def select(q, kv, weights, starts, ends, k: int) -> Peers:
    """Indices [S, k] of all queries, in any order; starts must be 0."""
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
