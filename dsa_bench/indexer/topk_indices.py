"""Top-k selection in bytes of scores per second, compared with vLLM, SGLang, TokenSpeed, cuDNN-frontend and torch.

The peers promise no order among equal scores, and leave their indices in any order; ours are exact and ascending. All
write into a given tensor, as in engines. Rows of index scores are padded, as `fp8_mqa_logits` gives them; peers that
take only contiguous scores get copies, made outside the timing.
"""

from collections.abc import Callable
from functools import partial

import torch

import dsa
from dsa_bench.harness.agreement import agree_selected
from dsa_bench.harness.case import Case, bytes_rate, fresh
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


def _index_scores(rows: int, cols: int) -> torch.Tensor:
    """Scores of the indexer for hidden states that resemble their neighbours: V3.2's 64 heads of 128, in FP8."""
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


def case(rows: int, cols: int, kind: str, k: int) -> Case:
    graph, size = rows < 1024, rows * cols * 4
    inputs = fresh(size, partial(_SCORES[kind], rows, cols), most=40 if graph else 2)
    lengths = torch.full((rows,), cols, dtype=torch.int32, device="cuda")
    outs = [torch.empty(rows, k, dtype=torch.int32, device="cuda") for _ in inputs]
    calls = {
        "dsa": [partial(dsa.topk_indices, x, k, lengths=lengths, out=out) for x, out in zip(inputs, outs)],
        "torch.topk": [partial(_torch_topk, x, k) for x in inputs],
    }
    given = [(x, lengths, k) for x in inputs]
    others = {"baselines": frozenset({"torch.topk"}), "agree": partial(agree_selected, keys=cols, scores=inputs[0])}
    name, peers = f"{rows} x {cols}, k {k}, {kind} scores", topk.select(given) | cudnn.topk(given)
    return Case(name, calls, bytes_rate(size, us=False), peers, graph=graph, **others)
