"""SwiGLU, and a sigmoid gate, with an FP8 cast: bytes per second and their share of the copy bandwidth, compared with
the formula in PyTorch followed by our cast."""

from functools import partial

import torch

import dsa
from dsa_bench.harness.case import Case, Scaled, bf16, bytes_case

# rows, channels, power-of-two scales, limit of SwiGLU, and True for a sigmoid gate. 2048 channels: experts of V3.2 (8
# per token) and, with a limit, of V4-Flash (6 per token). 18432 channels: a dense layer.
SHAPES = [
    (32768, 2048, True, None),
    (32768, 2048, False, None),
    (24576, 2048, True, 10.0),
    (4096, 2048, True, None),
    (4096, 18432, True, None),
    (1024, 2048, True, None),
    (768, 2048, True, 10.0),
    (8, 2048, True, None),
    (6, 2048, True, 10.0),
]
# The gate of Hy4's attention with 32 heads of 256 channels.
SHAPES += [(rows, 8192, True, None, True) for rows in (4096, 64, 1)]


def _separate(gate: torch.Tensor, up: torch.Tensor, use_ue8m0: bool, *, limit: float | None) -> Scaled:
    g, u = gate.float(), up.float()
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return dsa.per_token_cast_to_fp8((torch.nn.functional.silu(g) * u).to(gate.dtype), use_ue8m0)


def _separate_gate(gate: torch.Tensor, x: torch.Tensor, use_ue8m0: bool) -> Scaled:
    return dsa.per_token_cast_to_fp8((torch.sigmoid(gate.float()) * x.float()).to(gate.dtype), use_ue8m0)


def case(rows: int, channels: int, use_ue8m0: bool, limit: float | None, gated: bool = False) -> Case:
    kind = ", sigmoid" if gated else "" if limit is None else f", limit {limit:g}"
    swiglu = {"dsa": partial(dsa.swiglu_cast_to_fp8, limit=limit), "torch": partial(_separate, limit=limit)}
    return bytes_case(
        f"{rows} x {channels} bf16, {'ue8m0' if use_ue8m0 else 'fp32'}{kind}",
        rows * channels * (4 + 1 + 4 / 128),
        lambda: (*bf16(rows, 2 * channels).chunk(2, -1), use_ue8m0),
        {"dsa": dsa.gate_cast_to_fp8, "torch": _separate_gate} if gated else swiglu,
        baselines={"torch"},
    )
