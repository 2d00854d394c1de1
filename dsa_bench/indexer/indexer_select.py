"""Scores and selection in one op: TFLOP/s of the pairs in range, compared with two separate ops, ours and the peers'.

The separate ops write up to 4 GiB of scores at a time; where our layers' prefill uses separate ops, they write at most
260 MiB. The peers always accumulate scores in fp32, even in the cases with our fp16 accumulators. They do not say which
of several equal scores they select.
"""

from functools import partial

import torch

import dsa
from dsa_bench.harness.case import RECALL, Case, agree_selected, causal_ranges, e4m3, f32, flop_rate, fp8_gemm, scales
from dsa_bench.peers import topk

# queries, keys, heads, head dimension, k, scores (`_scales`), accumulators (default float32); all causal
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
    """Return the scales of the keys, fp32 [keys]. With "ascending", scores grow from key to key (see `case`). With
    "plateau", most scores are zero, and our kernel's lists of candidates overflow."""
    if kind == "ascending":
        return torch.arange(1, keys + 1, device="cuda").float()
    scale = scales(keys)
    if kind == "plateau":
        scale[torch.rand(keys, device="cuda") < 0.99] = 0.0
    return scale


def case(queries: int, keys: int, heads: int, dim: int, k: int, kind: str, accumulators: str = "float32") -> Case:
    q, kv, weights = e4m3(queries, heads, dim), (e4m3(keys, dim), _scales(keys, kind)), f32(queries, heads)
    if kind == "ascending":  # equal keys and non-negative weights, so that the scales alone order a query's scores
        kv[0][:] = kv[0][0].clone()
        weights.abs_()
    starts, ends = causal_ranges(queries, keys)
    arguments = (q, kv, weights, starts, ends)
    precision = {"accumulators": getattr(torch, accumulators)}
    out = torch.empty(queries, k, dtype=torch.int32, device="cuda")
    size = max(1, topk.SCORES // (4 * keys))

    def in_two() -> torch.Tensor:
        for first in range(0, queries, size):
            part = slice(first, first + size)
            scores = dsa.fp8_mqa_logits(
                *(q[part], kv, weights[part], starts[part], ends[part]),
                clean_logits=False,
                max_seqlen_k=keys,
                **precision,
            )
            dsa.topk_indices(scores, k, lengths=ends[part], out=out[part])
        return out

    name = f"{queries} x {keys}, H {heads}, D {dim}, k {k}, causal, {kind} scores"
    name += "" if accumulators == "float32" else f", {accumulators} accumulators"
    return Case(
        name,
        {"dsa": [partial(dsa.indexer_select, *arguments, k, **precision)], TWO_OPS: [in_two]},
        flop_rate(2 * int((ends - starts).sum()) * heads * dim, fp8_gemm),
        topk.select_scored(*arguments, k),
        repeats=9,
        yardsticks={TWO_OPS},
        # On a plateau any of the tied keys may be selected.
        agree=partial(agree_selected, keys=keys, least=0.0 if kind == "plateau" else RECALL),
    )
