"""Top-k selection in bytes of scores per second, against vLLM, SGLang, TokenSpeed, cuDNN-frontend and torch.

The peers promise no order among equal scores, and leave their indices in any order; ours are exact and ascending. All
of them write into a tensor that is there, as engines have it. Rows of index scores are padded, as `fp8_mqa_logits`
gives them; peers that take contiguous scores alone get copies, made outside the timing.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

import dsa
from dsa.testing import copy_bandwidth
from dsa_bench.harness import agreement
from dsa_bench.harness.case import Call, Case
from dsa_bench.peers import cudnn, topk

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
PROBED = [(64, 8192, "normal", 2048), (1024, 8192, "normal", 512)]
_FRESH_BYTES = 400e6  # of inputs in a graph: more than the L2 cache holds
_RECALL = 0.98  # of the selected scores that a peer must have
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


def _torch_topk(scores: torch.Tensor, k: int) -> torch.Tensor:
    return torch.topk(scores, k, dim=-1, sorted=False).indices


def _agree(scores: torch.Tensor, got: Any, ours: torch.Tensor) -> None:
    """Different keys, and nearly all of them as high as our lowest: some peers compare with fewer bits, and ties may be
    other keys."""
    rows = agreement.some(len(ours))
    selected, own, scores = agreement.first(got)[rows].long(), ours[rows].long(), scores[rows]
    if selected.shape != own.shape or not ((selected >= 0) & (selected < scores.shape[1])).all():
        raise AssertionError(f"differs: not {own.shape[1]} keys of each row")
    if (selected.sort(1).values.diff(dim=1) == 0).any():
        raise AssertionError("differs: a key is there twice")
    lowest = scores.gather(1, own).amin(1, keepdim=True)
    if (recall := (scores.gather(1, selected) >= lowest).float().mean().item()) < _RECALL:
        raise AssertionError(f"differs: {recall:.1%} of the keys are as high as ours")


def case(rows: int, cols: int, kind: str, k: int) -> Case:
    graph = rows < 1024
    size = rows * cols * 4
    copies = min(40, max(2, int(_FRESH_BYTES / size))) if graph else 2
    inputs = [_SCORES[kind](rows, cols) for _ in range(copies)]
    lengths = torch.full((rows,), cols, dtype=torch.int32, device="cuda")
    outs = [torch.empty(rows, k, dtype=torch.int32, device="cuda") for _ in inputs]
    ours = [partial(dsa.topk_indices, x, k, lengths=lengths, out=out) for x, out in zip(inputs, outs)]
    calls: dict[str, list[Call]] = {"dsa": ours}
    calls["torch.topk"] = [partial(_torch_topk, x, k) for x in inputs]
    failed: dict[str, str] = {}
    for peers in (maker([(x, lengths, k) for x in inputs]) for maker in (topk.select, cudnn.topk)):
        calls |= peers.calls
        failed |= peers.failed

    def figure(ms: float) -> str:
        rate = size / (ms * 1e-3)
        return f"{rate / 1e9:.0f} GB/s, {rate / _ceiling():.0%} of copy"

    name, baselines = f"{rows} x {cols}, k {k}, {kind} scores", frozenset({"torch.topk"})
    agree = partial(_agree, inputs[0])
    return Case(name, calls, figure, graph=graph, baselines=baselines, failed=failed, agree=agree)
