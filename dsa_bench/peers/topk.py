"""Top-k of vLLM, SGLang and TokenSpeed: alone, after index scores, and in whole passes.

They select from rows whose keys start in the first column, write indices in any order, and write into a given tensor.

TokenSpeed's kernel is its CuTe DSL port of DeepSelect for Hopper. Facts: scores are fp32 with rows at multiples of 16
bytes, lengths and indices int32, k at most 2048. A row of at most k keys yields all keys in order, then -1. The kernel
also writes the selected scores. It breaks ties arbitrarily but always in the same way, and never selects a NaN. A
cluster of up to 8 CTAs splits a row. Each of the 11 pairs of capacity and cluster size is compiled at its first call.
"""

from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType

import torch

import dsa
from dsa_bench.harness.calls import Call, Peers, into
from dsa_bench.peers.operators import SGLANG, VLLM
from dsa_bench.peers.package import Operators, SourceFile

SELECTED = (512, 1024, 2048)  # keys that vLLM's cooperative and persistent top-k select
COOPERATIVE_ROWS = 64  # at most
WORKSPACE_BYTES = 1 << 20  # of these two; only they may write to it
CONTIGUOUS = ("vllm persistent", "vllm cooperative")  # take only contiguous scores
_SGLANG_K = 2048  # SGLang's top-k takes no other k
DEEPSELECT = SourceFile("deepselect", "tokenspeed_kernel", "ops/attention/dsa/_cute_dsl/deep_select.py")
_DEEPSELECT_K = 2048  # at most
Selector = Operators | SourceFile
TopK = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]  # scores, lengths, out
Make = Callable[[torch.Tensor], TopK]  # makes a call from lengths, for at most as many rows


def select(inputs: Iterable[tuple[torch.Tensor, torch.Tensor, int]]) -> Peers:
    """Indices of (scores, lengths, k). Libraries that need contiguous scores get copies, made outside the timing."""
    inputs, peers = list(inputs), Peers()
    scores, _, k = inputs[0]
    for name, (library, make) in those_for(len(scores), k).items():
        taken = [(x.contiguous(), *rest) for x, *rest in inputs] if name in CONTIGUOUS else inputs
        peers |= Peers.of({library: partial(_into_new, make)}, taken, name)
    return peers


def those_for(rows: int, k: int) -> dict[str, tuple[Selector, Make]]:
    """{name: (library, function that makes a call)} of all that take this number of rows and k."""
    found: dict[str, tuple[Selector, Make]] = {
        "vllm prefill": (VLLM, lambda lengths: partial(_prefill, torch.zeros_like(lengths))),
        "vllm decode": (VLLM, lambda lengths: _decode),
    }
    if k in SELECTED:
        found["vllm persistent"] = VLLM, partial(_with_workspace, "persistent_topk")
        if rows <= COOPERATIVE_ROWS:
            found["vllm cooperative"] = VLLM, partial(_with_workspace, "cooperative_topk")
    if k == _SGLANG_K:
        found["sglang"] = SGLANG, lambda lengths: _sglang
    if k <= _DEEPSELECT_K:
        found[DEEPSELECT.name] = (
            DEEPSELECT,
            lambda lengths: partial(_deepselect, DEEPSELECT.load(), dsa.num_sms(lengths.device)),
        )
    return found


def _into_new(make: Make, module: ModuleType, scores: torch.Tensor, lengths: torch.Tensor, k: int) -> Call:
    out = torch.empty(len(scores), k, dtype=torch.int32, device=scores.device)
    return partial(into, out, partial(make(lengths), scores, lengths, out))


def _prefill(starts: torch.Tensor, scores: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> None:
    """starts: zeros, at least as many as rows."""
    sizes = len(scores), scores.stride(0), 1, out.shape[1]
    torch.ops._C.top_k_per_row_prefill(scores, starts[: len(scores)], lengths, out, *sizes)


def _decode(scores: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> None:
    torch.ops._C.top_k_per_row_decode(scores, 1, lengths, out, len(scores), scores.stride(0), 1, out.shape[1])


def _with_workspace(operator: str, lengths: torch.Tensor) -> TopK:
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=lengths.device)
    return lambda scores, lengths, out: getattr(torch.ops._C, operator)(
        scores, lengths, out, workspace, out.shape[1], scores.shape[1]
    )


def _sglang(scores: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> None:
    torch.ops.sgl_kernel.fast_topk(scores, out, lengths, None)


def _deepselect(module: ModuleType, sms: int, scores: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> None:
    k = out.shape[1]
    capacity = module.capacity_for(k)
    ctas = module.choose_cluster_size(*scores.shape, capacity, sms)
    module.deepselect_topk(scores, lengths, k, capacity=capacity, cluster_size=ctas, indices=out)
