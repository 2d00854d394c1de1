"""SwiGLU with an FP8 cast: bytes per second and their share of the copy bandwidth, compared with the formula in PyTorch
followed by our cast."""

from functools import partial

import torch

import dsa
from dsa_bench.harness.case import Case, Scaled, bf16, bytes_case

# rows, channels, power-of-two scales, limit of SwiGLU. 2048 channels: experts of V3.2 (8 per token) and, with a limit,
# of V4-Flash (6 per token). 18432 channels: a dense layer.
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


def _separate(gate: torch.Tensor, up: torch.Tensor, use_ue8m0: bool, *, limit: float | None) -> Scaled:
    g, u = gate.float(), up.float()
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return dsa.per_token_cast_to_fp8((torch.nn.functional.silu(g) * u).to(gate.dtype), use_ue8m0)


def case(rows: int, channels: int, use_ue8m0: bool, limit: float | None) -> Case:

    bound = "" if limit is None else f", limit {limit:g}"
    return bytes_case(
        f"{rows} x {channels} bf16, {'ue8m0' if use_ue8m0 else 'fp32'}{bound}",
        rows * channels * (4 + 1 + 4 / 128),
        lambda: (*bf16(rows, 2 * channels).chunk(2, -1), use_ue8m0),
        {"dsa": partial(dsa.swiglu_cast_to_fp8, limit=limit), "torch": partial(_separate, limit=limit)},
        baselines={"torch"},
    )
