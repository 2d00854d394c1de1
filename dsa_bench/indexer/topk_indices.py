"""Top-k selection: bytes of scores per second, compared with vLLM, SGLang, TokenSpeed, cuDNN-frontend and torch.

Our indices are exact and ascending. The peers return theirs in any order. Only cuDNN-frontend's deterministic variant
says which of several equal scores it selects. Our op, vLLM, SGLang and TokenSpeed write into a given tensor, as in
engines; cuDNN-frontend and torch allocate their results. Scores of the kind "indexer" have padded rows, as
`fp8_mqa_logits` returns them. Peers that accept only contiguous scores get copies, made outside the timing.
"""

from collections.abc import Callable
from functools import partial

import torch

import dsa
from dsa_bench.harness.case import Case, agree_selected, bytes_rate, f32, fresh
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
    """Return index scores [rows, cols] with V3.2's sizes. Adjacent keys resemble each other, as in text."""
    step, decay = f32(cols, 128), torch.arange(64, device="cuda")
    keys = torch.nn.functional.conv1d(step.T[:, None], (0.95**decay).flip(0)[None, None], padding=63)[:, 0, :cols].T
    queries = keys[torch.randint(cols, (rows,), device="cuda"), None] + 2 * f32(rows, 64, 128)
    k, scale = dsa.per_token_cast_to_fp8(keys.contiguous().bfloat16())
    every = torch.full((rows,), cols, dtype=torch.int32, device="cuda")
    q, kv, weights = queries.to(torch.float8_e4m3fn), (k, scale.squeeze(-1)), f32(rows, 64) + 1
    return dsa.fp8_mqa_logits(q, kv, weights, torch.zeros_like(every), every, clean_logits=False)


_SCORES: dict[str, Callable[[int, int], torch.Tensor]] = {
    "normal": f32,
    "indexer": _index_scores,
    # Most scores are exactly zero, and so is the k-th largest, as in models with few index heads.
    "plateau": lambda rows, cols: (f32(rows, cols) - 2).relu(),
}


def case(rows: int, cols: int, kind: str, k: int) -> Case:
    graph, size = rows < 1024, rows * cols * 4
    scores = fresh(size, partial(_SCORES[kind], rows, cols), most=40 if graph else 2)
    lengths = torch.full((rows,), cols, dtype=torch.int32, device="cuda")
    outs = [torch.empty(rows, k, dtype=torch.int32, device="cuda") for _ in scores]
    inputs = [(x, lengths, k) for x in scores]
    return Case(
        f"{rows} x {cols}, k {k}, {kind} scores",
        {
            "dsa": [partial(dsa.topk_indices, x, k, lengths=lengths, out=out) for x, out in zip(scores, outs)],
            "torch.topk": [lambda x=x: torch.topk(x, k, dim=-1, sorted=False).indices for x in scores],
        },
        bytes_rate(size, us=False),
        topk.select(inputs) | cudnn.topk(inputs),
        graph=graph,
        baselines={"torch.topk"},
        agree=partial(agree_selected, keys=cols, scores=scores[0]),
    )
