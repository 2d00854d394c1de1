"""Operators of vLLM (`torch.ops._C`) and SGLang (`torch.ops.sgl_kernel`): the FP8 cast, and the merge of attention
branches.

The operators write into given tensors, which a call returns. Each engine can be installed without the other.
"""

from collections.abc import Iterable
from functools import partial
from operator import attrgetter
from types import ModuleType

import torch

from dsa_bench.harness.calls import Call, Peers, into
from dsa_bench.peers.package import Operators

VLLM = Operators("vllm", "vllm", ("_C_stable_libtorch.abi3.so",))
SGLANG = Operators("sglang", "sgl_kernel", ("sm90/common_ops.abi3.so",))
BUILDS = (VLLM, SGLANG)


def cast(inputs: Iterable[tuple[torch.Tensor, bool]]) -> Peers:
    """Return calls that compute (e4m3 values, fp32 scales per row and 128 channels) from inputs (x [rows, channels],
    use_ue8m0)."""
    makes = {
        VLLM: partial(_cast, "_C.per_token_group_fp8_quant", (False, False)),
        SGLANG: partial(_cast, "sgl_kernel.sgl_per_token_group_quant_8bit", ()),
    }
    return Peers.of(makes, inputs)


def _cast(operator: str, flags: tuple, module: ModuleType, x: torch.Tensor, use_ue8m0: bool) -> Call:
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    out = q, torch.empty((x.shape[0], x.shape[1] // 128), dtype=torch.float32, device=x.device)
    arguments = (x, *out, 128, 1e-4, -448.0, 448.0, use_ue8m0, *flags)
    return partial(into, out, partial(attrgetter(operator)(module), *arguments))


def merge(inputs: Iterable[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> Peers:
    """Return calls that compute (out, lse [tokens, heads]) from inputs (outs, lses) of two branches. vLLM needs LSEs
    [heads, tokens]; they are transposed outside the timing."""
    return Peers.of({VLLM: _merge_vllm, SGLANG: _merge_sglang}, inputs)


def _merge_vllm(module: ModuleType, outs, lses) -> Call:
    (a, b), (log_a, log_b) = outs, [x.T.contiguous() for x in lses]
    out, lse = torch.empty_like(a), torch.empty_like(log_a)
    # The last argument None says that all tokens have both branches.
    return partial(into, (out, lse.T), partial(torch.ops._C.merge_attn_states, out, lse, a, log_a, b, log_b, None))


def _merge_sglang(module: ModuleType, outs, lses) -> Call:
    (a, b), (log_a, log_b) = outs, lses
    out, lse = torch.empty_like(a), torch.empty_like(log_a)
    return partial(into, (out, lse), partial(torch.ops.sgl_kernel.merge_state_v2, a, log_a, b, log_b, out, lse))
