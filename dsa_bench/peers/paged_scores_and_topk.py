"""Index scores over pages and selection as engines decode: DeepGEMM's scores, their plan made beforehand, and vLLM's or
SGLang's top-k of them."""

from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType

import torch

from dsa_bench.harness.calls import Call
from dsa_bench.peers import deep_gemm
from dsa_bench.peers.operators import SGLANG, VLLM
from dsa_bench.peers.package import Operators, Peers

_WORKSPACE = 1 << 20
_COOPERATIVE = 64  # rows that vLLM's cooperative top-k takes
_SGLANG_K = 2048  # what SGLang's top-k selects
TopK = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]  # scores, lengths, out


def select(inputs: Iterable[tuple], k: int) -> Peers:
    """Indices [B next_n, k], in any order, of (q, pages, weights, lengths [B], block_table, columns)."""
    inputs, peers = list(inputs), Peers()
    q = inputs[0][0]
    of_scores = deep_gemm.paged_mqa_logits(inputs)
    peers.failed |= {name: why for name, why in of_scores.failed.items() if name == deep_gemm.NEW.name}
    scores = of_scores.calls.get(deep_gemm.NEW.name)
    if scores is None:
        return peers
    pairs = [(one, deep_gemm.visible_keys(given[3], q.shape[1]).flatten()) for one, given in zip(scores, inputs)]

    def add(library: Operators, make: Callable[[], TopK], name: str) -> None:
        peers.add(library, partial(_both, make, k), pairs, f"{deep_gemm.NEW.name}, {name}")

    add(VLLM, lambda: _decode, "vllm decode")
    add(VLLM, partial(_with_workspace, "persistent_topk", q.device), "vllm persistent")
    if q.shape[0] * q.shape[1] <= _COOPERATIVE:
        add(VLLM, partial(_with_workspace, "cooperative_topk", q.device), "vllm cooperative")
    if k == _SGLANG_K:
        add(SGLANG, lambda: _sglang, "sglang")
    return peers


def _both(make: Callable[[], TopK], k: int, module: ModuleType, scores: Call, lengths: torch.Tensor) -> Call:
    out, topk = torch.empty(len(lengths), k, dtype=torch.int32, device=lengths.device), make()

    def call() -> torch.Tensor:
        topk(scores(), lengths, out)
        return out

    return call


def _decode(scores: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> None:
    torch.ops._C.top_k_per_row_decode(scores, 1, lengths, out, len(scores), scores.stride(0), 1, out.shape[1])


def _with_workspace(operator: str, device: torch.device) -> TopK:
    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)

    def topk(scores: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> None:
        getattr(torch.ops._C, operator)(scores, lengths, out, workspace, out.shape[1], scores.shape[1])

    return topk


def _sglang(scores: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> None:
    torch.ops.sgl_kernel.fast_topk(scores, out, lengths, None)
