"""Operators of vLLM (`torch.ops._C`) and SGLang (`torch.ops.sgl_kernel`): top-k, the FP8 cast, the merge of branches.

They write to tensors that they are given; a call returns these. Either engine's may be installed without the other's.
"""

from collections.abc import Iterable
from functools import partial
from types import ModuleType

import torch

from dsa_bench.harness.calls import Call
from dsa_bench.peers.package import Operators, Peers

VLLM = Operators("vllm", "vllm", ("_C_stable_libtorch.abi3.so",))
SGLANG = Operators("sglang", "sgl_kernel", ("sm90/common_ops.abi3.so",))
BUILDS = (VLLM, SGLANG)
_WORKSPACE = 1 << 20
_COOPERATIVE = 64  # rows that vLLM's cooperative top-k takes
_SGLANG_K = 2048  # what SGLang's top-k selects


def topk(inputs: Iterable[tuple[torch.Tensor, torch.Tensor, int]]) -> Peers:
    """Indices of (scores, lengths, k), from key 0 on, in any order. Where an operator takes contiguous scores alone, it
    gets copies of such as are not, made beforehand."""
    inputs, peers = list(inputs), Peers()
    scores, _, k = inputs[0]
    peers.add(VLLM, _topk_prefill, inputs, "vllm prefill")
    peers.add(VLLM, _topk_decode, inputs, "vllm decode")
    whole = [(x.contiguous(), *rest) for x, *rest in inputs]
    peers.add(VLLM, partial(_topk_workspace, "persistent_topk"), whole, "vllm persistent")
    if len(scores) <= _COOPERATIVE:
        peers.add(VLLM, partial(_topk_workspace, "cooperative_topk"), whole, "vllm cooperative")
    if k == _SGLANG_K:
        peers.add(SGLANG, _topk_sglang, inputs)
    return peers


def _empty_indices(scores: torch.Tensor, k: int) -> torch.Tensor:
    return torch.empty(len(scores), k, dtype=torch.int32, device=scores.device)


def _topk_prefill(module: ModuleType, scores, lengths, k: int) -> Call:
    out, starts = _empty_indices(scores, k), torch.zeros_like(lengths)
    arguments = (scores, starts, lengths, out, len(scores), scores.stride(0), 1, k)
    return partial(_into, out, partial(torch.ops._C.top_k_per_row_prefill, *arguments))


def _topk_decode(module: ModuleType, scores, lengths, k: int) -> Call:
    out = _empty_indices(scores, k)
    arguments = (scores, 1, lengths, out, len(scores), scores.stride(0), 1, k)
    return partial(_into, out, partial(torch.ops._C.top_k_per_row_decode, *arguments))


def _topk_workspace(operator: str, module: ModuleType, scores, lengths, k: int) -> Call:
    out, workspace = _empty_indices(scores, k), torch.zeros(_WORKSPACE, dtype=torch.uint8, device=scores.device)
    call = partial(getattr(torch.ops._C, operator), scores, lengths, out, workspace, k, scores.shape[1])
    return partial(_into, out, call)


def _topk_sglang(module: ModuleType, scores, lengths, k: int) -> Call:
    out = _empty_indices(scores, k)
    return partial(_into, out, partial(torch.ops.sgl_kernel.fast_topk, scores, out, lengths, None))


def cast(inputs: Iterable[tuple[torch.Tensor, bool]]) -> Peers:
    """(e4m3, scales of 128 channels) of (x, whether scales are powers of two)."""
    inputs, peers = list(inputs), Peers()
    peers.add(VLLM, _cast_vllm, inputs)
    peers.add(SGLANG, _cast_sglang, inputs)
    return peers


def _cast_buffers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    return q, torch.empty((x.shape[0], x.shape[1] // 128), dtype=torch.float32, device=x.device)


def _cast_vllm(module: ModuleType, x, use_ue8m0: bool) -> Call:
    out = _cast_buffers(x)
    arguments = (x, *out, 128, 1e-4, -448.0, 448.0, use_ue8m0, False, False)
    return partial(_into, out, partial(torch.ops._C.per_token_group_fp8_quant, *arguments))


def _cast_sglang(module: ModuleType, x, use_ue8m0: bool) -> Call:
    out = _cast_buffers(x)
    arguments = (x, *out, 128, 1e-4, -448.0, 448.0, use_ue8m0)
    return partial(_into, out, partial(torch.ops.sgl_kernel.sgl_per_token_group_quant_8bit, *arguments))


def merge(inputs: Iterable[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> Peers:
    """(out, lse [tokens, heads]) of two branches; vLLM's LSEs are [heads, tokens]."""
    inputs, peers = list(inputs), Peers()
    peers.add(VLLM, _merge_vllm, inputs)
    peers.add(SGLANG, _merge_sglang, inputs)
    return peers


def _merge_vllm(module: ModuleType, outs, lses) -> Call:
    (a, b), turned = outs, [x.T.contiguous() for x in lses]
    out, lse = torch.empty_like(a), torch.empty_like(turned[0])
    # None: all tokens have both branches.
    call = partial(torch.ops._C.merge_attn_states, out, lse, a, turned[0], b, turned[1], None)
    return partial(_into, (out, lse.T), call)


def _merge_sglang(module: ModuleType, outs, lses) -> Call:
    (a, b), (log_a, log_b) = outs, lses
    out, lse = torch.empty_like(a), torch.empty_like(log_a)
    return partial(_into, (out, lse), partial(torch.ops.sgl_kernel.merge_state_v2, a, log_a, b, log_b, out, lse))


def _into(out: object, call: Call) -> object:
    call()
    return out
