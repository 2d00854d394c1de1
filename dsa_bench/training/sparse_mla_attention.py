"""The backward of sparse MLA attention compared with cuDNN-FE's for Hopper, both with a sink; FLOP as its authors
count."""

from functools import partial
from typing import Any

import torch

import dsa
from dsa.ops.training.sparse_mla_attention import gradients
from dsa_bench.harness.agreement import agree
from dsa_bench.harness.case import Case, bf16_gemm, flop_rate
from dsa_bench.peers import cudnn

# d, heads, selected keys, deterministic
SHAPES = [
    (576, 128, 2048, False),
    (576, 64, 2048, False),
    (512, 64, 512, False),
    (512, 128, 1024, False),
    (576, 128, 2048, True),
]
PROBED = [(512, 64, 512, False)]
QUERIES, KEYS, D_V = 8192, 8192, 512


def _indices(selected: int) -> torch.Tensor:
    parts = [torch.rand(1024, KEYS, device="cuda").topk(selected, dim=1).indices.int() for _ in range(QUERIES // 1024)]
    return torch.cat(parts)[:, None].contiguous()


def case(d: int, heads: int, selected: int, deterministic: bool) -> Case:
    q = torch.randn(QUERIES, heads, d, device="cuda", dtype=torch.bfloat16) / 10
    kv = torch.randn(KEYS, 1, d, device="cuda", dtype=torch.bfloat16) / 10
    indices, scale, sink = _indices(selected), d**-0.5, torch.zeros(heads, device="cuda")
    out, _, lse = dsa.flash_mla_sparse_fwd(q, kv, indices, scale, attn_sink=sink)
    dout = torch.randn_like(out)
    inputs = (q, kv, indices, scale, sink, out, lse, dout)
    peers = cudnn.attention_backward(*inputs)
    calls = {"dsa": [partial(gradients, *inputs, None, deterministic)]}
    figure = flop_rate(2 * QUERIES * selected * heads * (3 * d + 2 * D_V), bf16_gemm)

    kind = ", deterministic" if deterministic else ""
    name = f"{QUERIES} queries, d {d}, {heads} heads, k {selected}{kind}"
    return Case(name, calls, figure, peers, repeats=5, agree=_agree, reference=False)


def _agree(theirs: Any, ours: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    """All three gradients; the peers' keys have no dimension of key heads."""
    dq, dkv, dsink = ours
    agree(theirs, (dq, dkv.squeeze(1), dsink))
