"""The FP8 cast of tokens, written to a row per token and expert: bytes per second, compared with our cast followed by a
gather of the rows in PyTorch."""

from functools import partial

import torch

import dsa
from dsa_bench.harness.case import Case, Scaled, bf16, bytes_rate

# tokens, channels, experts per token: MoE layers of V3.2 and, with 4096 channels, of V4-Flash, in prefill and in
# decoding
SHAPES = [(8192, 7168, 8), (8192, 4096, 6), (1024, 7168, 8), (128, 7168, 8), (1, 7168, 8)]
COPIED = "cast and copy"
_EXPERTS = 256


def _copied(x: torch.Tensor, tokens: torch.Tensor) -> Scaled:
    q, scale = dsa.per_token_cast_to_fp8(x)
    return q.view(torch.uint8)[tokens].view(q.dtype), scale[tokens]


def case(tokens: int, channels: int, top_k: int) -> Case:
    x, experts = bf16(tokens, channels), torch.rand(tokens, _EXPERTS, device="cuda").argsort(-1)[:, :top_k]
    order, rows, _ = dsa.sort_by_expert(experts, _EXPERTS)
    return Case(
        f"{tokens} x {channels} bf16, {top_k} of {_EXPERTS} experts",
        {"dsa": [partial(dsa.scatter_cast_to_fp8, x, rows)], COPIED: [partial(_copied, x, order // top_k)]},
        bytes_rate(tokens * channels * (2 + top_k * (1 + 4 / 128)), us=False),
        graph=tokens <= 1024,
        baselines={COPIED},
    )
