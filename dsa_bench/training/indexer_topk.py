"""Training's selection: unquantised scores and top-k. Shapes with few scores are compared with the formula in PyTorch,
which computes one sequence at a time."""

from functools import partial

import torch

import dsa
from dsa.reference.training import indexer_topk as reference
from dsa_bench.harness.case import Case

# sequences, tokens per sequence, index heads, channels per head, selected keys: three shapes with V3.2's heads, and one
# of a small model
SHAPES = [(4, 2048, 64, 128, 512), (1, 16384, 64, 128, 2048), (16, 2048, 64, 128, 512), (8, 2048, 8, 128, 128)]


def case(batch: int, length: int, heads: int, dim: int, top_k: int) -> Case:
    tokens = batch * length
    # q and k are small integers, and w are multiples of 1/8. So scores are exact, and our indices must equal the
    # formula's.
    q, k = (torch.randint(-1, 2, shape, device="cuda").bfloat16() for shape in ((tokens, heads, dim), (tokens, dim)))
    w = torch.randint(-4, 5, (tokens, heads), device="cuda") / 8
    bounds = torch.arange(0, tokens + 1, length, device="cuda", dtype=torch.int32)
    arguments = q, k, w, top_k, bounds, bounds, length, length
    calls, flops = {"dsa": [partial(dsa.indexer_topk, *arguments)]}, tokens * (length + 1) * heads * dim
    if heads * length <= 64 * 2048:  # above this, the formula's scores of all heads would not fit in memory
        calls["formula"] = [partial(reference.indexer_topk, *arguments)]

    return Case(
        f"{batch} x {length}, index {heads} x {dim}, top {top_k}",
        calls,
        lambda ms: f"{flops / (ms * 1e-3) / 1e12:.0f} TFLOP/s of visible pairs",
        repeats=5,
        baselines={"formula"},
    )
