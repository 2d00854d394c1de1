"""The FP8 cast: bytes a second against the copy bandwidth of the same run, beside vLLM's and SGLang's."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import dsa
from benchmarks.table import row
from dsa.testing import bench, copy_bandwidth

# tokens, channels, Hadamard: activations of V3.2's linears, a prefill chunk's index queries, decode batches
SHAPES = [
    (65536, 7168, False),
    (8192, 7168, False),
    (4096, 18432, False),
    (128, 7168, False),
    (65536, 7168, True),
    (4096 * 64, 128, True),
    (128 * 64, 128, True),
]


def _peers(x: torch.Tensor, use_ue8m0: bool) -> dict[str, Callable[[], None]]:
    """The kernels of vLLM and SGLang for the same job, where their operators can be loaded."""
    try:
        import peer_topk  # noqa: F401  (loads both operator libraries)
    except (ImportError, OSError):
        return {}
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device="cuda")
    scale = torch.empty((x.shape[0], x.shape[1] // 128), dtype=torch.float32, device="cuda")
    common = (x, q, scale, 128, 1e-4, -448.0, 448.0, use_ue8m0)
    calls = {
        "vllm": partial(torch.ops._C.per_token_group_fp8_quant, *common, False, False),
        "sglang": partial(torch.ops.sgl_kernel.sgl_per_token_group_quant_8bit, *common),
    }
    return {name: call for name, call in calls.items() if _runs(call)}


def _runs(call: Callable[[], None]) -> bool:
    try:
        call()
        return True
    except RuntimeError:  # a peer that takes no fp32 buffer for ue8m0 scales, say
        return False


def run() -> list[dict[str, Any]]:
    ceiling = copy_bandwidth()
    rows = []
    for tokens, channels, hadamard in SHAPES:
        size = tokens * channels * (2 + 1 + 4 / 128)
        # Short kernels: a graph over enough inputs that none is found in the L2 cache.
        inputs = 1 if size > 400e6 else max(2, int(400e6 / size))
        xs = [torch.randn(tokens, channels, device="cuda").bfloat16() for _ in range(min(inputs, 64))]
        for use_ue8m0 in (True, False):
            calls = {"dsa": [partial(dsa.per_token_cast_to_fp8, x, use_ue8m0, hadamard=hadamard) for x in xs]}
            if not hadamard:
                peers = [_peers(x, use_ue8m0) for x in xs]
                calls |= {name: [p[name] for p in peers] for name in peers[0]}
            times = bench(calls, graph=len(xs) > 1)
            rate = size / (times["dsa"] * 1e-3)
            scales = "ue8m0" if use_ue8m0 else "fp32"
            rows.append(
                row(
                    f"{tokens} x {channels} bf16, {scales}{', Hadamard' if hadamard else ''}",
                    times,
                    f"{rate / 1e9:.0f} GB/s, {rate / ceiling:.0%} of copy",
                )
            )
    return rows
