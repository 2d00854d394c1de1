"""Sparse MLA prefill beside both builds of FlashMLA; where one does not take as few heads, they are padded, outside
the timing."""

from functools import cache, partial

import torch

import dsa
from dsa.testing import assert_close, bf16_gemm_rate
from dsa_bench.harness.case import Call, Case
from dsa_bench.peers import flash_mla

# keys, d, heads, selected keys
SHAPES = [
    *(
        (keys, *shape)
        for shape in ((576, 128, 2048), (576, 64, 2048), (512, 64, 512), (512, 128, 1024))
        for keys in (32768, 8192, 131072)
    ),
    *((keys, 576, heads, 2048) for heads in (16, 32) for keys in (32768, 8192, 131072)),
    *((32768, 576, heads, selected) for heads in (64, 128) for selected in (512, 1024)),
]
PROBED = [(4096, 576, 64, 2048, 128), (4096, 512, 128, 512, 128), (4096, 576, 16, 512, 128)]
QUERIES, D_V = 4096, 512
_ceiling = cache(bf16_gemm_rate)
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]


def _inputs(keys: int, d: int, heads: int, selected: int, queries: int) -> Inputs:
    q = torch.randn(queries, heads, d, device="cuda", dtype=torch.bfloat16) / 10
    kv = torch.randn(keys, 1, d, device="cuda", dtype=torch.bfloat16) / 10
    indices = torch.rand(queries, keys, device="cuda").topk(selected, dim=1).indices
    return q, kv, indices.int()[:, None].contiguous(), d**-0.5


def case(keys: int, d: int, heads: int, selected: int, queries: int = QUERIES) -> Case:
    inputs = q, kv, indices, scale = _inputs(keys, d, heads, selected, queries)
    peers = flash_mla.sparse_prefill([inputs])
    calls: dict[str, list[Call]] = {"dsa": [partial(dsa.flash_mla_sparse_fwd, *inputs)], **peers.calls}
    flops = 2 * queries * selected * heads * (d + D_V)

    def figure(ms: float) -> str:
        rate = flops / (ms * 1e-3)
        return f"{rate / 1e12:.0f} TFLOP/s, {rate / _ceiling():.0%} of bf16 GEMM"

    def check(got: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        some = torch.arange(0, queries, queries // 8, device="cuda")
        with dsa.use_backend("reference"):
            expected = dsa.flash_mla_sparse_fwd(q[some].float(), kv, indices[some], scale)
        assert_close("out", got[0][some], expected[0], abs_tol=8e-4, rel_tol=3.01 / 128, cos_tol=7e-6)
        for name, x, y in zip(("max_logits", "lse"), got[1:], expected[1:]):
            assert_close(name, x[some], y, abs_tol=1e-6, rel_tol=2.01 / 65536)

    name = f"{queries} queries, {keys} keys, d {d}, {heads} heads, k {selected}"
    return Case(name, calls, figure, check, repeats=15, failed=peers.failed)
