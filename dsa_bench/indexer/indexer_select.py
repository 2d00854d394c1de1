"""Scores and selection in one: TFLOP/s on the pairs in range, compared with the two by themselves, ours and the peers'.

The two by themselves write up to 4 GiB of scores at a time; our layers' prefill writes 260 MiB. The peers' scores are
fp32 also where ours have fp16 accumulators, as in layers. The peers promise no order among equal scores.
"""

from functools import partial

import torch

import dsa
from dsa_bench.harness.agreement import RECALL, agree_selected
from dsa_bench.harness.case import Case, flop_rate, fp8_gemm
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
TWO_OPS = "dsa, two ops"


def _scales(keys: int, kind: str) -> torch.Tensor:
    """Scales of keys. Most scores of a plateau are zero, and the lists of candidates overflow."""
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

    calls = {"dsa": [partial(dsa.indexer_select, *arguments, k, **precision)], TWO_OPS: [in_two]}
    peers = scores_and_topk.select(*arguments, k)
    name = f"{queries} x {keys}, H {heads}, D {dim}, k {k}, causal, {kind} scores"
    name += "" if accumulators == "float32" else f", {accumulators} accumulators"
    # Any of the tied keys of a plateau may be selected.
    agree = partial(agree_selected, keys=keys, least=0.0 if kind == "plateau" else RECALL)
    others = {"repeats": 9, "agree": agree, "yardsticks": frozenset({TWO_OPS})}
    return Case(name, calls, flop_rate(flop, fp8_gemm), peers, **others)
