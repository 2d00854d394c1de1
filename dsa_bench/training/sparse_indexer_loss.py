"""The loss of the indexer's sparse stage, and its gradients. No library publishes times of it, so the yardstick is our
forward attention to the same keys."""

from functools import partial

import torch

import dsa
from dsa.ops.training import sparse_indexer_loss as op
from dsa_bench.harness.case import Case, bf16, bf16_gemm, f32, flop_rate, selected_keys

# pass, keys, d, heads, selected keys: V3.2's, V4-Flash's, GLM-5's and V4-Pro's attention
SHAPES = [
    (which, keys, *shape)
    for shape in ((576, 128, 2048), (512, 64, 512), (576, 64, 2048), (512, 128, 1024))
    for keys in (8192, 65536)
    for which in ("forward", "backward", "deterministic backward")
]
QUERIES, INDEX_HEADS, INDEX_DIM = 8192, 64, 128
ATTENTION = "attention forward"


def _inputs(keys: int, d: int, heads: int, selected: int) -> tuple:
    q, kv = bf16(QUERIES, heads, d), bf16(keys, 1, d)
    q_idx, k_idx = (bf16(*shape, INDEX_DIM) * INDEX_DIM**-0.25 for shape in ((QUERIES, INDEX_HEADS), (keys,)))
    w = f32(QUERIES, INDEX_HEADS) * INDEX_HEADS**-0.5
    return q, kv, q_idx, k_idx, w, selected_keys(QUERIES, keys, selected)[:, None].contiguous(), 2 * d**-0.5


def case(which: str, keys: int, d: int, heads: int, selected: int) -> Case:
    inputs = q, kv, q_idx, k_idx, w, indices, scale = _inputs(keys, d, heads, selected)
    attention = partial(dsa.flash_mla_sparse_fwd, q, kv, indices, scale)
    forward = partial(op._sparse_indexer_loss.launch_on, q.device, *inputs, attention()[2].T, False)
    pairs = QUERIES * selected
    index_flops = 2 * pairs * INDEX_HEADS * INDEX_DIM
    if which == "forward":
        ours, flops = forward, 2 * pairs * heads * d + index_flops
    else:
        _, d_scores = forward()
        of_forward = q_idx, k_idx, w, indices, torch.ones(QUERIES, device="cuda"), d_scores
        ours = partial(op._sparse_indexer_loss_gradient.launch_on, q.device, *of_forward, which != "backward")
        flops = 3 * index_flops
    return Case(
        f"{which}, {QUERIES} queries, {keys} keys, d {d}, {heads} heads, k {selected}",
        {"dsa": [ours], ATTENTION: [attention]},
        flop_rate(flops, bf16_gemm),
        repeats=10,
        yardsticks={ATTENTION},
    )
