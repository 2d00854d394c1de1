"""SwiGLU with a cast: bytes a second and their share of a copy's, beside PyTorch's formula and our cast."""

from functools import cache, partial

import torch

import dsa
from dsa.testing import copy_bandwidth
from dsa_bench.harness.case import Case

# rows, channels, power-of-two scales, limit: V3.2's 8 and V4-Flash's 6 experts of 4096, 128 and 1 tokens, the shared
# expert's rows and those of a dense layer
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
_FRESH_BYTES = 400e6  # of inputs in a graph: more than the L2 cache holds
_ceiling = cache(copy_bandwidth)


def _separate(gate: torch.Tensor, up: torch.Tensor, use_ue8m0: bool, limit: float | None) -> object:
    g, u = gate.float(), up.float()
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return dsa.per_token_cast_to_fp8((torch.nn.functional.silu(g) * u).to(gate.dtype), use_ue8m0)


def case(rows: int, channels: int, use_ue8m0: bool, limit: float | None) -> Case:
    size = rows * channels * (4 + 1 + 4 / 128)
    count = min(64, max(2, int(_FRESH_BYTES / size)))
    inputs = [torch.randn(rows, 2 * channels, device="cuda").bfloat16().chunk(2, -1) for _ in range(count)]
    calls = {
        "dsa": [partial(dsa.swiglu_cast_to_fp8, *halves, use_ue8m0, limit=limit) for halves in inputs],
        "torch": [partial(_separate, *halves, use_ue8m0, limit) for halves in inputs],
    }

    def figure(ms: float) -> str:
        rate = size / (ms * 1e-3)
        return f"{ms * 1e3:.1f} us, {rate / 1e9:.0f} GB/s, {rate / _ceiling():.0%} of copy"

    def check(got: tuple[torch.Tensor, torch.Tensor]) -> None:
        back, expected = (
            q.float() * s.repeat_interleave(128, -1) for q, s in (got, _separate(*inputs[0], use_ue8m0, limit))
        )
        # A value that the last bit of silu moves to the next e4m3, or a scale to the next power of two.
        torch.testing.assert_close(back, expected, rtol=0.13, atol=1e-2)

    bound = "" if limit is None else f", limit {limit:g}"
    name = f"{rows} x {channels} bf16, {'ue8m0' if use_ue8m0 else 'fp32'}{bound}"
    return Case(name, calls, figure, check, graph=True, baselines=frozenset({"torch"}))
