"""Index scores and selection as an engine runs them: DeepGEMM's scores of some queries at a time, and vLLM's or
SGLang's top-k of them, into the rows of one result."""

from functools import partial
from types import ModuleType

import torch

from dsa_bench.harness.calls import Call
from dsa_bench.peers import deep_gemm
from dsa_bench.peers.operators import SGLANG, VLLM
from dsa_bench.peers.package import Peers

SCORES = 4 << 30  # bytes of scores at a time: no engine has room for more, and most have for less
_SGLANG_K = 2048


def select(q, kv, weights, starts, ends, k: int) -> Peers:
    """Indices [S, k] of all queries, in any order; starts must be 0."""
    peers, inputs = Peers(), [(q, kv, weights, starts, ends, k)]
    selections = {VLLM: _topk_vllm} | ({SGLANG: _topk_sglang} if k == _SGLANG_K else {})
    for library, topk in selections.items():
        name = f"{deep_gemm.NEW.name}, {library.name}"
        peers.add(deep_gemm.NEW, partial(_in_parts, topk), inputs, name, needs=(library,))
    return peers


def _in_parts(topk: Call, module: ModuleType, q, kv, weights, starts, ends, k: int) -> Call:
    out = torch.empty(len(q), k, dtype=torch.int32, device=q.device)
    size = max(1, SCORES // (4 * len(kv[0])))
    parts = [slice(first, first + size) for first in range(0, len(q), size)]
    scores = [deep_gemm.new_mqa_logits(module, q[part], kv, weights[part], starts[part], ends[part]) for part in parts]

    def call() -> torch.Tensor:
        for part, of_part in zip(parts, scores):
            topk(of_part(), starts[part], ends[part], out[part])
        return out

    return call


def _topk_vllm(scores: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> None:
    sizes = len(scores), scores.stride(0), 1, out.shape[1]
    torch.ops._C.top_k_per_row_prefill(scores, starts, lengths, out, *sizes)


def _topk_sglang(scores: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> None:
    torch.ops.sgl_kernel.fast_topk(scores, out, lengths, None)
