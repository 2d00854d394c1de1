"""The backward pass of sparse MLA attention compared with cuDNN-FE's for Hopper, both with a sink. FLOP are counted as
cuDNN-FE's authors count them."""

from functools import partial
from typing import Any

import torch

import dsa
from dsa.ops.training.sparse_mla_attention import gradients
from dsa_bench.harness.case import Case, agree, bf16, bf16_gemm, flop_rate, selected_keys
from dsa_bench.peers import cudnn

# d, heads, selected keys, deterministic: V3.2's, GLM-5's, V4-Flash's, V4-Pro's and again V3.2's attention
SHAPES = [
    (576, 128, 2048, False),
    (576, 64, 2048, False),
    (512, 64, 512, False),
    (512, 128, 1024, False),
    (576, 128, 2048, True),
]
PROBED = [(512, 64, 512, False)]
QUERIES, KEYS, D_V = 8192, 8192, 512


def case(d: int, heads: int, selected: int, deterministic: bool) -> Case:
    q, kv = bf16(QUERIES, heads, d) / 10, bf16(KEYS, 1, d) / 10
    indices = torch.cat([selected_keys(1024, KEYS, selected) for _ in range(QUERIES // 1024)])[:, None].contiguous()
    scale, sink = d**-0.5, torch.zeros(heads, device="cuda")
    out, _, lse = dsa.flash_mla_sparse_fwd(q, kv, indices, scale, attn_sink=sink)
    inputs = (q, kv, indices, scale, sink, out, lse, torch.randn_like(out))
    return Case(
        f"{QUERIES} queries, d {d}, {heads} heads, k {selected}{', deterministic' if deterministic else ''}",
        {"dsa": [partial(gradients, *inputs, None, deterministic)]},
        flop_rate(2 * QUERIES * selected * heads * (3 * d + 2 * D_V), bf16_gemm),
        cudnn.attention_backward([inputs]),
        repeats=5,
        agree=_agree,
        reference=False,
    )


def _agree(theirs: Any, ours: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    """Compare all three gradients. The peer's dkv has no dimension of key heads."""
    dq, dkv, dsink = ours
    agree(theirs, (dq, dkv.squeeze(1), dsink))
