"""The FP8 cast of tokens to their experts' rows: bytes a second, beside the cast and a copy of its rows in PyTorch."""

from functools import cache, partial

import torch

import dsa
from dsa.testing import copy_bandwidth
from dsa_bench.harness.case import Call, Case

# tokens, channels, experts of a token: V3.2's and V4-Flash's mixtures, prefill and decoding
SHAPES = [(8192, 7168, 8), (8192, 4096, 6), (1024, 7168, 8), (128, 7168, 8), (1, 7168, 8)]
COPIED = "cast and copy"
_EXPERTS = 256
_ceiling = cache(copy_bandwidth)


def _copied(x: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, scale = dsa.per_token_cast_to_fp8(x)
    return q.view(torch.uint8)[tokens].view(q.dtype), scale[tokens]


def case(tokens: int, channels: int, top_k: int) -> Case:
    x = torch.randn(tokens, channels, device="cuda").bfloat16()
    experts = torch.rand(tokens, _EXPERTS, device="cuda").argsort(-1)[:, :top_k]
    order, rows, _ = dsa.sort_by_expert(experts, _EXPERTS)
    size = tokens * channels * (2 + top_k * (1 + 4 / 128))

    def figure(ms: float) -> str:
        rate = size / (ms * 1e-3)
        return f"{rate / 1e9:.0f} GB/s, {rate / _ceiling():.0%} of copy"

    def check(got: tuple[torch.Tensor, torch.Tensor]) -> None:
        for one, expected in zip(got, _copied(x, order // top_k), strict=True):
            if not torch.equal(one.view(torch.uint8), expected.view(torch.uint8)):
                raise AssertionError("not the bytes of the cast")

    calls: dict[str, list[Call]] = {
        "dsa": [partial(dsa.scatter_cast_to_fp8, x, rows)],
        COPIED: [partial(_copied, x, order // top_k)],
    }
    name = f"{tokens} x {channels} bf16, {top_k} of {_EXPERTS} experts"
    return Case(name, calls, figure, check, graph=tokens <= 1024, baselines=frozenset({COPIED}))
