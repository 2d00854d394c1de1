"""Top-k of vLLM, SGLang and TokenSpeed: alone, and after DeepGEMM's index scores.

The calls here select from rows whose keys start in the first column, and write the indices into a given tensor. The
indices of a row have any order.

TokenSpeed's kernel is its CuTe DSL port of DeepSelect for Hopper. Facts: scores are fp32 with rows at multiples of 16
bytes, lengths and indices int32, k at most 2048. If a row has at most k keys, all are selected in order, followed by
-1. The kernel also writes the selected scores. It breaks ties arbitrarily but always in the same way, and never selects
a NaN. A cluster of up to 8 CTAs splits a row. Each of the 11 pairs of capacity and cluster size is compiled at its
first call.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import ModuleType

import torch

import dsa
from dsa_bench.harness.calls import Call, Peers, into
from dsa_bench.peers import deep_gemm
from dsa_bench.peers.operators import SGLANG, VLLM
from dsa_bench.peers.package import Operators, SourceFile

SELECTED = (512, 1024, 2048)  # the k that vLLM's cooperative and persistent top-k accept
COOPERATIVE_ROWS = 64  # largest number of rows of the cooperative top-k
WORKSPACE_BYTES = 1 << 20  # for the cooperative and the persistent top-k; no other kernel may write to it
# Largest size in bytes of the scores that a call computes at a time (`select_scored`). Engines usually have less room.
SCORES = 4 << 30
CONTIGUOUS = ("vllm persistent", "vllm cooperative")  # accept only contiguous scores
_SGLANG_K = 2048  # the only k that SGLang's top-k accepts
DEEPSELECT = SourceFile("deepselect", "tokenspeed_kernel", "ops/attention/dsa/_cute_dsl/deep_select.py")
_DEEPSELECT_K = 2048  # largest k that DeepSelect accepts
Selector = Operators | SourceFile
TopK = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]  # scores, lengths, out
Make = Callable[[torch.Tensor], TopK]  # lengths -> a top-k of at most len(lengths) rows


def select(inputs: Iterable[tuple[torch.Tensor, torch.Tensor, int]]) -> Peers:
    """Return calls that select indices from inputs (scores, lengths, k). Kernels that need contiguous scores get
    copies, made outside the timing."""
    inputs, peers = list(inputs), Peers()
    scores, _, k = inputs[0]
    for name, (library, make) in those_for(len(scores), k).items():
        taken = [(x.contiguous(), *rest) for x, *rest in inputs] if name in CONTIGUOUS else inputs
        peers |= Peers.of({library: partial(_into_new, make)}, taken, name)
    return peers


def those_for(rows: int, k: int) -> dict[str, tuple[Selector, Make]]:
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
    """Call vLLM's top-k for prefill. starts: zeros, at least one per row of `scores`."""
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


def select_scored(q, kv, weights, starts, ends, k: int) -> Peers:
    """Return calls, one peer per top-k, that compute the indices int32 [queries, k] of all queries, in any order.
    DeepGEMM 2.8.1 computes scores for some queries at a time, at most SCORES bytes. starts must be 0."""
    peers, inputs = Peers(), [(q, kv, weights, starts, ends, k)]
    for name, (library, make) in those_for(min(len(q), _queries(kv)), k).items():
        of_both = f"{deep_gemm.NEW.name}, {name}"
        peers |= Peers.of({deep_gemm.NEW: partial(_in_parts, make)}, inputs, of_both, needs=(library,))
    return peers


def _queries(kv) -> int:
    return max(1, SCORES // (4 * len(kv[0])))


def _in_parts(make: Make, module: ModuleType, q, kv, weights, starts, ends, k: int) -> Call:
    size = _queries(kv)
    parts = zip(*(x.split(size) for x in (q, weights, starts, ends)))
    scores = [deep_gemm.new_mqa_logits(module, q, kv, *others) for q, *others in parts]
    return _selecting(make, k, scores, ends, size)


def select_paged(inputs: Iterable[tuple], k: int) -> Peers:
    """Return calls, one peer per top-k, that compute the indices int32 [B next_n, k], in any order. inputs: (q, pages,
    weights, lengths [B], block_table, columns). DeepGEMM 2.8.1 computes the scores. The plan is made outside the
    timing."""
    inputs, name = list(inputs), deep_gemm.NEW.name
    next_n, found = inputs[0][0].shape[1], deep_gemm.paged_mqa_logits(inputs)
    peers = Peers(failed={key: why for key, why in found.failed.items() if key == name})
    lengths = [deep_gemm.visible_keys(given[3], next_n).flatten() for given in inputs]
    pairs = [([scores], each, len(each)) for scores, each in zip(found.calls.get(name, ()), lengths)]
    for selector, (library, make) in those_for(len(lengths[0]), k).items() if pairs else ():
        peers |= Peers.of(
            {library: lambda module, *pair, make=make: _selecting(make, k, *pair)}, pairs, f"{name}, {selector}"
        )
    return peers


def _selecting(make: Make, k: int, scores: Sequence[Call], lengths: torch.Tensor, size: int) -> Call:
    """Return a call that computes the scores of `size` rows at a time and selects from them. It returns all indices as
    one tensor int32 [rows, k]. scores: a call per part."""
    out, select = torch.empty(len(lengths), k, dtype=torch.int32, device=lengths.device), make(lengths)
    parts = [*zip(scores, lengths.split(size), out.split(size))]

    def call() -> torch.Tensor:
        for of_part, lengths_of_part, out_of_part in parts:
            select(of_part(), lengths_of_part, out_of_part)
        return out

    return call
