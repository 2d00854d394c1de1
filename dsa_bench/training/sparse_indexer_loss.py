"""The sparse stage's loss; the yardstick is the forward attention to the same keys, as no peer publishes times."""

from functools import partial

import torch

import dsa
from dsa.ops.training import sparse_indexer_loss as op
from dsa_bench.harness.case import Case, bf16_gemm, flop_rate

# pass, keys, d, heads, selected keys: V3.2's and V4's
SHAPES = [
    (which, keys, *shape)
    for shape in ((576, 128, 2048), (512, 64, 512), (576, 64, 2048), (512, 128, 1024))
    for keys in (8192, 65536)
    for which in ("forward", "backward", "deterministic backward")
]
QUERIES, INDEX_HEADS, INDEX_DIM = 8192, 64, 128
ATTENTION = "attention forward"


def _inputs(keys: int, d: int, heads: int, selected: int) -> tuple:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    q, kv = normal(QUERIES, heads, d), normal(keys, 1, d)
    q_idx, k_idx = (normal(*shape, INDEX_DIM) * INDEX_DIM**-0.25 for shape in ((QUERIES, INDEX_HEADS), (keys,)))
    w = torch.randn(QUERIES, INDEX_HEADS, device="cuda") * INDEX_HEADS**-0.5
    indices = torch.rand(QUERIES, keys, device="cuda").topk(selected, dim=1).indices.int()[:, None].contiguous()
    return q, kv, q_idx, k_idx, w, indices, 2 * d**-0.5


def case(which: str, keys: int, d: int, heads: int, selected: int) -> Case:
    inputs = q, kv, q_idx, k_idx, w, indices, scale = _inputs(keys, d, heads, selected)
    lse = dsa.flash_mla_sparse_fwd(q, kv, indices, scale)[2].T
    pairs = QUERIES * selected
    index_flops = 2 * pairs * INDEX_HEADS * INDEX_DIM
    if which == "forward":
        ours = partial(op._sparse_indexer_loss.launch_on, q.device, *inputs, lse, False)
        flops = 2 * pairs * heads * d + index_flops
    else:
        grad = torch.ones(QUERIES, device="cuda")
        _, d_scores = op._sparse_indexer_loss.launch_on(q.device, *inputs, lse, False)
        of_forward = q_idx, k_idx, w, indices, grad, d_scores
        ours = partial(op._sparse_indexer_loss_gradient.launch_on, q.device, *of_forward, which != "backward")
        flops = 3 * index_flops

    calls = {"dsa": [ours], ATTENTION: [partial(dsa.flash_mla_sparse_fwd, q, kv, indices, scale)]}
    name = f"{which}, {QUERIES} queries, {keys} keys, d {d}, {heads} heads, k {selected}"
    return Case(name, calls, flop_rate(flops, bf16_gemm), repeats=10, yardsticks=frozenset({ATTENTION}))
