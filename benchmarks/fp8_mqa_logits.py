"""Index scores over contiguous keys: TFLOP/s on the pairs in range, beside DeepGEMM."""

from collections.abc import Callable
from typing import Any

import torch

import dsa
from benchmarks.table import row
from dsa.testing import bench, fp8_gemm_rate

# queries, keys, heads, head dimension; causal
SHAPES = [
    (4096, 32768, 64, 128),
    (2048, 8192, 64, 128),
    (4096, 131072, 64, 128),
    (8192, 65536, 32, 128),
    (4096, 8192, 32, 64),
]


def _peers(*arguments: Any) -> dict[str, Callable[[], object]]:
    try:
        import deep_gemm
    except ImportError:
        return {}
    return {"deepgemm": lambda: deep_gemm.fp8_mqa_logits(*arguments, clean_logits=True)}


def run() -> list[dict[str, Any]]:
    ceiling = fp8_gemm_rate()
    rows = []
    for queries, keys, heads, dim in SHAPES:
        q = torch.randn(queries, heads, dim, device="cuda").to(torch.float8_e4m3fn)
        kv = torch.randn(keys, dim, device="cuda").to(torch.float8_e4m3fn), torch.rand(keys, device="cuda") + 0.5
        weights = torch.randn(queries, heads, device="cuda")
        starts = torch.zeros(queries, dtype=torch.int32, device="cuda")
        ends = torch.arange(queries, dtype=torch.int32, device="cuda") + keys - queries
        arguments = (q, kv, weights, starts, ends)
        calls = {"dsa": lambda a=arguments: dsa.fp8_mqa_logits(*a), **_peers(*arguments)}
        times = bench(calls, repeats=15)
        rate = 2 * int((ends - starts).sum()) * heads * dim / (times["dsa"] * 1e-3)
        figure = f"{rate / 1e12:.0f} TFLOP/s, {rate / ceiling:.0%} of FP8 GEMM"
        rows.append(row(f"{queries} x {keys}, H {heads}, D {dim}, causal, cleaned", times, figure))
    return rows
