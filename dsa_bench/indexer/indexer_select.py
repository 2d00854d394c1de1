"""Scores and selection in one: TFLOP/s on the pairs in range, beside the two by themselves, ours and the peers'.

By themselves, scores of as many queries at a time as take up to 4 GiB are in memory; our layers' prefill has 260 MiB of
them. With fp16 accumulators, as layers have them, the peers' scores are fp32 still. They promise no order among equal
scores.
"""

from functools import cache, partial
from typing import Any

import torch

import dsa
from dsa.testing import fp8_gemm_rate
from dsa_bench.harness import agreement
from dsa_bench.harness.case import Call, Case
from dsa_bench.peers import scores_and_topk

# queries, keys, heads, head dimension, k, scores, accumulators; causal
SHAPES = [
    (4096, 131072, 64, 128, 2048, "normal"),
    (2048, 524288, 64, 128, 2048, "normal"),
    (4096, 32768, 64, 128, 2048, "normal"),
    (8192, 65536, 32, 128, 2048, "normal"),
    (2048, 8192, 64, 128, 2048, "normal"),
    (2048, 32768, 64, 128, 512, "normal"),
    (4096, 131072, 64, 128, 2048, "plateau"),
    (4096, 131072, 64, 128, 2048, "ascending"),
    (4096, 131072, 64, 128, 2048, "normal", "float16"),
    (2048, 524288, 64, 128, 2048, "normal", "float16"),
    (4096, 65536, 64, 128, 2048, "normal", "float16"),
    (4096, 32768, 64, 128, 2048, "normal", "float16"),
]
PROBED = [(512, 4096, 64, 128, 2048, "normal")]
_RECALL = 0.98  # of our keys that a peer must have selected, where scores do not tie
_ceiling = cache(fp8_gemm_rate)


def _scales(keys: int, kind: str) -> torch.Tensor:
    """Of keys. Most scores of a plateau are zero, and the lists of candidates overflow."""
    if kind == "ascending":
        return torch.arange(1, keys + 1, device="cuda").float()
    scale = torch.rand(keys, device="cuda") + 0.5
    if kind == "plateau":
        scale[torch.rand(keys, device="cuda") < 0.99] = 0.0
    return scale


def case(queries: int, keys: int, heads: int, dim: int, k: int, kind: str, accumulators: str = "float32") -> Case:
    q = torch.randn(queries, heads, dim, device="cuda").to(torch.float8_e4m3fn)
    kv = torch.randn(keys, dim, device="cuda").to(torch.float8_e4m3fn), _scales(keys, kind)
    weights = torch.randn(queries, heads, device="cuda")
    if kind == "ascending":  # by the scales alone
        kv[0][:] = kv[0][0].clone()
        weights.abs_()
    starts = torch.zeros(queries, dtype=torch.int32, device="cuda")
    ends = torch.arange(queries, dtype=torch.int32, device="cuda") + keys - queries
    arguments = (q, kv, weights, starts, ends)
    precision = {"accumulators": getattr(torch, accumulators)}
    flop = 2 * int((ends - starts).sum()) * heads * dim
    out = torch.empty(queries, k, dtype=torch.int32, device="cuda")
    size = max(1, scores_and_topk.SCORES // (4 * keys))

    def in_two() -> torch.Tensor:
        for first in range(0, queries, size):
            part = slice(first, first + size)
            own = q[part], kv, weights[part], starts[part], ends[part]
            scores = dsa.fp8_mqa_logits(*own, clean_logits=False, max_seqlen_k=keys, **precision)
            dsa.topk_indices(scores, k, lengths=ends[part], out=out[part])
        return out

    def figure(ms: float) -> str:
        rate = flop / (ms * 1e-3)
        return f"{rate / 1e12:.0f} TFLOP/s, {rate / _ceiling():.0%} of FP8 GEMM"

    def check(got: torch.Tensor) -> None:
        if not torch.equal(got, in_two()):
            raise AssertionError("not the keys of scores and top-k by themselves")

    def agree(got: Any, ours: torch.Tensor) -> None:
        """Different keys of those that there are, nearly all of them ours."""
        rows = agreement.some(queries)
        selected, own = agreement.first(got)[rows].long(), ours[rows].long()
        if selected.shape != own.shape or not ((selected >= 0) & (selected < keys)).all():
            raise AssertionError(f"differs: not {k} keys of each query")
        if (selected.sort(1).values.diff(dim=1) == 0).any():
            raise AssertionError("differs: a key is there twice")
        both = torch.cat((selected, own), 1).sort(1).values
        if kind != "plateau" and (recall := (both.diff(dim=1) == 0).sum().item() / own.numel()) < _RECALL:
            raise AssertionError(f"differs: {recall:.1%} of the keys are ours")

    peers = scores_and_topk.select(*arguments, k)
    calls: dict[str, list[Call]] = {"dsa": [partial(dsa.indexer_select, *arguments, k, **precision)]}
    calls |= {"dsa, two ops": [in_two]} | peers.calls
    name = f"{queries} x {keys}, H {heads}, D {dim}, k {k}, causal, {kind} scores"
    name += "" if accumulators == "float32" else f", {accumulators} accumulators"
    options = {"repeats": 9, "failed": peers.failed, "agree": agree, "yardsticks": frozenset({"dsa, two ops"})}
    return Case(name, calls, figure, check, **options)
