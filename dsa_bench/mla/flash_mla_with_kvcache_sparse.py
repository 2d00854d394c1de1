"""MLA decoding over selected keys of an FP8 cache (656 bytes a token) beside both builds of FlashMLA, which take 64 and
128 heads: others are padded, outside the timing.

Each sequence selects random keys of its own part of one cache, and every call of a graph has other parts.
"""

from functools import cache, partial

import torch

import dsa
from dsa.testing import assert_close, bf16_gemm_rate, copy_bandwidth
from dsa_bench.harness.agreement import agree_attention
from dsa_bench.harness.case import Call, Case
from dsa_bench.peers import flash_mla

# sequences, heads, query tokens, selected keys, keys of a sequence
SHAPES = [
    (128, 128, 2, 2048, 32768),
    (64, 128, 2, 2048, 32768),
    (2, 128, 2, 2048, 32768),
    *((batch, 128, queries, 2048, 32768) for queries in (3, 4) for batch in (128, 64, 2)),
    *((128, 64, 4, selected, 32768) for selected in (512, 2048)),
    (128, 128, 1, 2048, 32768),
    (128, 64, 1, 2048, 32768),
    (1, 128, 1, 2048, 131072),
    *((batch, heads, 1, 2048, 32768) for heads in (16, 32) for batch in (128, 2)),
    *((128, heads, 1, selected, 32768) for heads in (64, 128) for selected in (512, 1024)),
]
PROBED = [(4, 64, 1, 512, 4096), (2, 128, 2, 2048, 4096), (2, 16, 1, 512, 4096)]
D, D_V, PAGE, BYTES = 576, 512, 64, 656
_FRESH_BYTES = 150e6  # that the calls of a graph select: more than the L2 cache holds
_copy, _gemm = cache(copy_bandwidth), cache(bf16_gemm_rate)
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _cache(rows: int) -> torch.Tensor:
    """A cache of 65536 random latents, over and over."""
    block = torch.empty(65536 // PAGE, PAGE, 1, BYTES, dtype=torch.uint8, device="cuda")
    latents = torch.randn(65536, D, device="cuda", dtype=torch.bfloat16) / 10
    dsa.write_kv_cache(latents, block, torch.arange(65536, device="cuda"))
    return block.repeat(-(-rows // 65536), 1, 1, 1)[: rows // PAGE]


def _inputs(kv: torch.Tensor, first: int, batch: int, heads: int, queries: int, selected: int, keys: int) -> Inputs:
    """Of the sequences that have the parts from number `first` on."""
    q = torch.randn(batch, queries, heads, D, device="cuda", dtype=torch.bfloat16) / 10
    own = torch.rand(batch, queries, keys, device="cuda").topk(selected, dim=2).indices
    return q, kv, (own + (first + torch.arange(batch, device="cuda"))[:, None, None] * keys).int()


def _ours(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor) -> Call:
    plan, _ = dsa.get_mla_metadata()
    return partial(dsa.flash_mla_with_kvcache, q, kv, None, None, D_V, plan, None, is_fp8_kvcache=True, indices=indices)


def case(batch: int, heads: int, queries: int, selected: int, keys: int) -> Case:
    moved = batch * queries * selected * BYTES
    count = max(1, min(32, int(_FRESH_BYTES // moved)))
    kv = _cache(count * batch * keys)
    inputs = [_inputs(kv, i * batch, batch, heads, queries, selected, keys) for i in range(count)]
    peers = flash_mla.sparse_decode(inputs)
    calls: dict[str, list[Call]] = {"dsa": [_ours(*i) for i in inputs], **peers.calls}
    flops = 2 * batch * queries * selected * heads * (D + D_V)

    def figure(ms: float) -> str:
        rate, bandwidth = flops / (ms * 1e-3), moved / (ms * 1e-3)
        if rate / _gemm() > bandwidth / _copy():
            return f"{rate / 1e12:.0f} TFLOP/s, {rate / _gemm():.0%} of bf16 GEMM"
        return f"{bandwidth / 1e9:.0f} GB/s, {bandwidth / _copy():.0%} of copy"

    def check(got: tuple[torch.Tensor, torch.Tensor]) -> None:
        q, _, indices = (x[:1] for x in inputs[0])
        with dsa.use_backend("reference"):
            expected = _ours(q.float(), kv, indices)()
        assert_close("out", got[0][:1], expected[0], abs_tol=1e-3, rel_tol=2.01 / 128, cos_tol=5e-6)
        assert_close("lse", got[1][:1], expected[1], abs_tol=1e-6, rel_tol=8.01 / 65536)

    name = f"B {batch}, {heads} heads, s_q {queries}, k {selected}, {keys} keys"
    return Case(name, calls, figure, check, graph=True, failed=peers.failed, agree=agree_attention)
