"""Scores over pages and selection in one call, as decoding has them: microseconds in a CUDA graph, beside the peers'
two kernels.

Our call plans the scores itself; the peers' plans are made beforehand, as a step's layers share them. The peers promise
no order among equal scores.
"""

from functools import cache, partial
from typing import Any

import torch

import dsa
from dsa.testing import copy_bandwidth
from dsa_bench.harness import agreement
from dsa_bench.harness.case import Call, Case
from dsa_bench.peers import deep_gemm, paged_scores_and_topk

# sequences, keys of each, queries a sequence, heads, k
SHAPES = [
    *((batch, keys, 1, 64, 2048) for keys in (131072, 32768, 4096) for batch in (1, 8, 32)),
    *((batch, 1 << 20, 1, 64, 2048) for batch in (1, 8)),
    *((batch, 131072, next_n, 64, 2048) for next_n in (2, 4) for batch in (1, 8)),
    *((batch, 32768, 1, 64, 512) for batch in (1, 8)),
]
PROBED = [(2, 4096, 1, 64, 2048), (2, 4096, 2, 64, 2048), (4, 4096, 4, 32, 512)]
DIM, PAGE = 128, 64
_FRESH_BYTES = 128 << 20  # of inputs in a graph: more than the L2 cache holds
_COPIES = 128  # at most
_RECALL = 0.98  # of our keys that a peer must have selected
_ceiling = cache(copy_bandwidth)
Inputs = tuple[Any, ...]


def _inputs(batch: int, keys: int, next_n: int, heads: int) -> Inputs:
    """q, cache, weights, lengths, block table."""
    width = -(-keys // PAGE)
    pages = batch * width
    values = torch.randn(pages, PAGE * DIM, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
    scales = (torch.rand(pages, PAGE, device="cuda") + 0.5).view(torch.uint8)
    cache = torch.cat((values, scales), 1).view(pages, PAGE, 1, DIM + 4)
    table = torch.randperm(pages, dtype=torch.int32).view(batch, width).cuda()
    q = torch.randn(batch, next_n, heads, DIM, device="cuda").to(torch.float8_e4m3fn)
    weights = torch.randn(batch * next_n, heads, device="cuda")
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    return q, cache, weights, lengths, table


def _in_two(q, cache, weights, lengths, table, keys: int, k: int) -> torch.Tensor:
    """Slots by the two ops."""
    batch, next_n = q.shape[:2]
    sequences = torch.arange(batch, dtype=torch.int32, device="cuda").repeat_interleave(next_n)
    paging = {"block_table": table, "page_size": PAGE, "row_to_seq": sequences}
    scores = dsa.fp8_paged_mqa_logits(q, cache, weights, lengths, table, None, keys)
    return dsa.topk_indices(scores, k, lengths=deep_gemm.visible_keys(lengths, next_n).flatten(), **paging)


def case(batch: int, keys: int, next_n: int, heads: int, k: int) -> Case:
    size = batch * keys * (DIM + 4)
    inputs = [_inputs(batch, keys, next_n, heads) for _ in range(max(2, min(_COPIES, _FRESH_BYTES // size)))]
    calls: dict[str, list[Call]] = {"dsa": [partial(dsa.paged_indexer_select, *i, keys, k, slots=True) for i in inputs]}
    peers = paged_scores_and_topk.select([(*i, keys) for i in inputs], k)

    def figure(ms: float) -> str:
        rate = size / (ms * 1e-3)
        return f"{ms * 1e3:.1f} us, {rate / 1e9:.0f} GB/s, {rate / _ceiling():.0%} of copy"

    def check(got: torch.Tensor) -> None:
        if not torch.equal(got, _in_two(*inputs[0], keys, k)):
            raise AssertionError("not the keys of scores and top-k by themselves")

    def agree(got: Any, ours: torch.Tensor) -> None:
        """Different keys of those that there are, nearly all of them ours. Theirs are not yet slots."""
        plain = dsa.paged_indexer_select(*inputs[0], keys, k)
        rows = agreement.some(len(ours))
        selected, own = agreement.first(got)[rows].long(), plain[rows].long()
        if selected.shape != own.shape or not ((selected >= 0) & (selected < keys)).all():
            raise AssertionError(f"differs: not {k} keys of each query")
        if (selected.sort(1).values.diff(dim=1) == 0).any():
            raise AssertionError("differs: a key is there twice")
        both = torch.cat((selected, own), 1).sort(1).values
        if (recall := (both.diff(dim=1) == 0).sum().item() / own.numel()) < _RECALL:
            raise AssertionError(f"differs: {recall:.1%} of the keys are ours")

    name = f"{batch} x {keys}, next_n {next_n}, H {heads}, D {DIM}, k {k}"
    rest = {"graph": True, "failed": peers.failed, "agree": agree}
    return Case(name, calls | peers.calls, figure, check, **rest)
