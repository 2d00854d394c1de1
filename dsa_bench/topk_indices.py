"""Top-k selection: bytes of scores a second, beside vLLM's, SGLang's, cuDNN-frontend's and torch's.

The peers promise no order among equal scores, and leave their indices in any order; ours are exact and ascending.
"""

from collections.abc import Callable
from functools import cache, partial

import torch

import dsa
from dsa.testing import copy_bandwidth
from dsa_bench.harness.case import Call, Case

# rows, columns, scores, k
SHAPES = [
    (4096, 8192, "normal", 2048),
    (4096, 32768, "normal", 2048),
    (1024, 131072, "normal", 2048),
    (64, 8192, "normal", 2048),
    (64, 32768, "normal", 2048),
    (64, 131072, "normal", 2048),
    (8, 131072, "normal", 2048),
    (1, 32768, "normal", 2048),
    (1, 131072, "normal", 2048),
    (4096, 32768, "indexer", 2048),
    (64, 131072, "indexer", 2048),
    (1, 131072, "indexer", 2048),
    (4096, 32768, "plateau", 2048),
    (4096, 32768, "normal", 512),
    (64, 131072, "normal", 512),
]
_FRESH_BYTES = 400e6  # of inputs in a graph: more than the L2 cache holds
_WORKSPACE = 1 << 20
_ceiling = cache(copy_bandwidth)


def _index_scores(rows: int, cols: int) -> torch.Tensor:
    """What the indexer gives for hidden states that resemble their neighbours: V3.2's 64 heads of 128, in FP8."""
    step = torch.randn(cols, 128, device="cuda")
    decay = torch.arange(64, device="cuda")
    keys = torch.nn.functional.conv1d(step.T[:, None], (0.95**decay).flip(0)[None, None], padding=63)[:, 0, :cols].T
    queries = keys[torch.randint(cols, (rows,), device="cuda"), None] + 2 * torch.randn(rows, 64, 128, device="cuda")
    k, scale = dsa.per_token_cast_to_fp8(keys.contiguous().bfloat16())
    weights = torch.randn(rows, 64, device="cuda") + 1
    every = torch.full((rows,), cols, dtype=torch.int32, device="cuda")
    q = queries.to(torch.float8_e4m3fn)
    return dsa.fp8_mqa_logits(q, (k, scale.squeeze(-1)), weights, torch.zeros_like(every), every, clean_logits=False)


_SCORES: dict[str, Callable[[int, int], torch.Tensor]] = {
    "normal": lambda rows, cols: torch.randn(rows, cols, device="cuda"),
    "indexer": _index_scores,
    # Few heads leave most scores at exactly zero, and the k-th among them.
    "plateau": lambda rows, cols: (torch.randn(rows, cols, device="cuda") - 2).relu(),
}


def _peers(scores: torch.Tensor, lengths: torch.Tensor, k: int) -> dict[str, Call]:
    rows, cols = scores.shape
    peers: dict[str, Call] = {"torch.topk": partial(torch.topk, scores, k, dim=-1, sorted=False)}
    try:
        from cudnn import DSA

        peers["cudnn"] = partial(DSA.indexer_top_k_wrapper, scores, lengths, k, return_val=False)
        peers["cudnn deterministic"] = partial(peers["cudnn"], deterministic=True)
    except ImportError:
        pass
    try:
        import peer_topk  # noqa: F401  (loads both operator libraries)
    except ImportError:
        return peers
    vllm, stride = torch.ops._C, scores.stride(0)
    out = torch.empty(rows, k, dtype=torch.int32, device="cuda")
    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device="cuda")
    starts = torch.zeros_like(lengths)
    peers["vllm prefill"] = partial(vllm.top_k_per_row_prefill, scores, starts, lengths, out, rows, stride, 1, k)
    peers["vllm decode"] = partial(vllm.top_k_per_row_decode, scores, 1, lengths, out, rows, stride, 1, k)
    if scores.is_contiguous():
        peers["vllm persistent"] = partial(vllm.persistent_topk, scores, lengths, out, workspace, k, cols)
        if rows <= 64:
            peers["vllm cooperative"] = partial(vllm.cooperative_topk, scores, lengths, out, workspace, k, cols)
    if k == 2048:
        peers["sglang"] = partial(torch.ops.sgl_kernel.fast_topk, scores, out, lengths, None)
    return peers


def _runs(call: Call, graph: bool) -> bool:
    """Whether a peer takes the shape, and a graph if it must."""
    try:
        call()
        torch.cuda.synchronize()
        if graph:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                call()
    except Exception:
        return False
    return True


def case(rows: int, cols: int, kind: str, k: int) -> Case:
    graph = rows < 1024
    size = rows * cols * 4
    copies = min(40, max(2, int(_FRESH_BYTES / size))) if graph else 2
    inputs = [_SCORES[kind](rows, cols) for _ in range(copies)]
    lengths = torch.full((rows,), cols, dtype=torch.int32, device="cuda")
    calls: dict[str, list[Call]] = {"dsa": [partial(dsa.topk_indices, x, k, lengths=lengths) for x in inputs]}
    peers = [_peers(x, lengths, k) for x in inputs]
    calls |= {name: [p[name] for p in peers] for name, call in peers[0].items() if _runs(call, graph)}

    def figure(ms: float) -> str:
        rate = size / (ms * 1e-3)
        return f"{rate / 1e9:.0f} GB/s, {rate / _ceiling():.0%} of copy"

    return Case(f"{rows} x {cols}, k {k}, {kind} scores", calls, figure, graph=graph)
