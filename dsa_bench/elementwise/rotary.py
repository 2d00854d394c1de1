"""The rotation: bytes a second and the share of the copy bandwidth, beside the PyTorch formula."""

from functools import cache, partial

import torch

import dsa
from dsa.reference.elementwise import rotary as reference
from dsa.testing import copy_bandwidth
from dsa_bench.harness.case import Case

ROTATED = 64
# tokens, heads, channels, neighbours, first or last, in place: V4's queries and outputs, V3.2's queries and keys, its
# indexer's queries without FP8
SHAPES = [
    (4096, 64, 512, True, "last", False),
    (4096, 64, 512, True, "last", True),
    (4096, 128, 64, True, "first", False),
    (4096, 64, 128, False, "first", False),
    *((tokens, 64, 512, True, "last", in_place) for tokens in (128, 1) for in_place in (False, True)),
    *((tokens, 128, 64, True, "first", False) for tokens in (128, 1)),
]
_FRESH_BYTES = 400e6  # of inputs in a graph: more than the L2 cache holds
_ceiling = cache(copy_bandwidth)


def case(tokens: int, heads: int, channels: int, interleaved: bool, dims: str, in_place: bool) -> Case:
    size = 2 * 2 * tokens * heads * (ROTATED if in_place else channels) + 2 * 4 * tokens * ROTATED // 2
    held = 2 * tokens * heads * channels
    inputs = []
    for _ in range(min(64, max(2, int(_FRESH_BYTES / held)))):
        angles = torch.randn(tokens, ROTATED // 2, device="cuda")
        x = torch.randn(tokens, heads, channels, device="cuda").bfloat16()
        inputs.append((x, angles.cos(), angles.sin()))
    kind = {"interleaved": interleaved, "dims": dims}
    x, cos, sin = inputs[0]
    expected = reference.apply_rotary(x, cos, sin, **kind)

    def check(got: torch.Tensor) -> None:
        # In place the same tensor is turned again and again: its length stays, but for rounding.
        if not in_place and not torch.equal(got, expected):
            raise AssertionError("not the reference's bits")

    def figure(ms: float) -> str:
        rate = size / (ms * 1e-3)
        return f"{ms * 1e3:.1f} us, {rate / 1e9:.0f} GB/s, {rate / _ceiling():.0%} of copy"

    calls = {
        "dsa": [partial(dsa.apply_rotary, *i, **kind, out=i[0] if in_place else None) for i in inputs],
        "formula": [partial(reference.apply_rotary, *i, **kind) for i in inputs],
    }
    pairs = "neighbours" if interleaved else "halves"
    name = f"{tokens} x {heads} x {channels} bf16, {dims} {ROTATED} in {pairs}{', in place' if in_place else ''}"
    return Case(name, calls, figure, check, graph=True, baselines=frozenset({"formula"}))
