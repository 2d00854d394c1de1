"""Dense MLA decoding beside both builds of FlashMLA: the table of its own tests, and short batches, where
latency counts."""

from functools import cache, partial

import torch

import dsa
from dsa.testing import assert_close, bf16_gemm_rate, copy_bandwidth
from dsa_bench.harness.agreement import agree_attention
from dsa_bench.harness.case import Call, Case
from dsa_bench.peers import flash_mla

# sequences, keys of each, heads, query tokens
SHAPES = [
    *((128, 4096, heads, queries) for heads, queries in ((16, 1), (64, 1), (128, 1), (128, 2))),
    *((128, 16384, heads, queries) for heads, queries in ((16, 1), (64, 1), (64, 2), (128, 1), (128, 2))),
    *((128, 4096, heads, 1) for heads in (8, 32)),
    *((batch, keys, heads, 1) for batch in (1, 4, 16) for keys in (1024, 8192, 131072) for heads in (16, 64, 128)),
]
PROBED = [(4, 1024, 16, 1), (4, 1024, 128, 2)]
D, D_V, PAGE = 576, 512, 64
_FRESH_BYTES = 150e6  # of caches in a graph: more than the L2 cache holds
_copy, _gemm = cache(copy_bandwidth), cache(bf16_gemm_rate)
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _inputs(batch: int, keys: int, heads: int, queries: int) -> Inputs:
    q = torch.randn(batch, queries, heads, D, device="cuda", dtype=torch.bfloat16) / 10
    pages = -(-keys // PAGE)
    kv = torch.randn(batch * pages, PAGE, 1, D, device="cuda", dtype=torch.bfloat16) / 10
    table = torch.randperm(batch * pages, device="cuda").int().view(batch, pages)
    return q, kv, table, torch.full((batch,), keys, dtype=torch.int32, device="cuda")


def _ours(inputs: Inputs) -> Call:
    plan, _ = dsa.get_mla_metadata()
    return partial(dsa.flash_mla_with_kvcache, *inputs, D_V, plan, causal=True)


def case(batch: int, keys: int, heads: int, queries: int) -> Case:
    # Every call of a graph has another cache; their plans are made by the first call, outside it.
    count = max(1, min(32, int(_FRESH_BYTES // (batch * keys * D * 2))))
    inputs = [_inputs(batch, keys, heads, queries) for _ in range(count)]
    peers = flash_mla.dense_decode(inputs)
    calls: dict[str, list[Call]] = {"dsa": [_ours(i) for i in inputs], **peers.calls}
    flops = 2 * batch * keys * heads * queries * (D + D_V)
    moved = batch * keys * D * 2 + batch * queries * heads * (D + D_V) * 2

    def figure(ms: float) -> str:
        rate, bandwidth = flops / (ms * 1e-3), moved / (ms * 1e-3)
        if rate / _gemm() > bandwidth / _copy():
            return f"{rate / 1e12:.0f} TFLOP/s, {rate / _gemm():.0%} of bf16 GEMM"
        return f"{bandwidth / 1e9:.0f} GB/s, {bandwidth / _copy():.0%} of copy"

    def check(got: tuple[torch.Tensor, torch.Tensor]) -> None:
        q, kv, table, _ = inputs[0]
        for b in {0, batch - 1}:
            own = kv[table[b].long(), :, 0].view(-1, D).double()
            logits = torch.einsum("shd,nd->shn", q[b].double(), own) * D**-0.5
            seen = keys - queries + 1 + torch.arange(queries, device="cuda")
            logits.masked_fill_(torch.arange(keys, device="cuda") >= seen[:, None, None], -torch.inf)
            expected = logits.softmax(2) @ own[:, :D_V]
            assert_close("out", got[0][b], expected, abs_tol=8e-4, rel_tol=2.01 / 128, cos_tol=5e-6)

    name = f"B {batch}, {keys} keys, {heads} heads, s_q {queries}"
    return Case(name, calls, figure, check, graph=True, failed=peers.failed, agree=agree_attention)
