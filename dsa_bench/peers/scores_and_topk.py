"""Index scores and selection as in engines: DeepGEMM's scores followed by another library's top-k."""

from collections.abc import Iterable, Sequence
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
    size = _queries(kv)
    parts = zip(*(x.split(size) for x in (q, weights, starts, ends)))
    scores = [deep_gemm.new_mqa_logits(module, q, kv, *others) for q, *others in parts]
    return _selecting(make, k, scores, ends, size)


def select_paged(inputs: Iterable[tuple], k: int) -> Peers:
    """Indices [B next_n, k], in any order, of (q, pages, weights, lengths [B], block_table, columns). The scores' plan
    is made outside the timing."""
    inputs, name = list(inputs), deep_gemm.NEW.name
    next_n, found = inputs[0][0].shape[1], deep_gemm.paged_mqa_logits(inputs)
    peers = Peers(failed={key: why for key, why in found.failed.items() if key == name})
    lengths = [deep_gemm.visible_keys(given[3], next_n).flatten() for given in inputs]
    pairs = [([scores], each, len(each)) for scores, each in zip(found.calls.get(name, ()), lengths)]
    for selector, (library, make) in topk.those_for(len(lengths[0]), k).items() if pairs else ():
        peers |= Peers.of(
            {library: lambda module, *pair, make=make: _selecting(make, k, *pair)}, pairs, f"{name}, {selector}"
        )
    return peers


def _selecting(make: topk.Make, k: int, scores: Sequence[Call], lengths: torch.Tensor, size: int) -> Call:
    """Select from the scores of `size` rows at a time, into one tensor."""
    out, select = torch.empty(len(lengths), k, dtype=torch.int32, device=lengths.device), make(lengths)
    parts = [*zip(scores, lengths.split(size), out.split(size))]

    def call() -> torch.Tensor:
        for of_part, lengths_of_part, out_of_part in parts:
            select(of_part(), lengths_of_part, out_of_part)
        return out

    return call
