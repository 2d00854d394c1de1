"""The rotation: bytes per second and their share of the copy bandwidth, compared with the PyTorch formula."""

from functools import partial

import dsa
from dsa.reference.elementwise import rotary as reference
from dsa_bench.harness.case import Case, angles, bf16, bytes_rate, fresh, over

ROTATED = 64
# tokens, heads, channels, whether a pair is two adjacent channels, whether the first or the last channels rotate,
# whether in place: V4's queries and outputs, V3.2's queries and keys, and its indexer's queries before the FP8 cast
SHAPES = [
    (4096, 64, 512, True, "last", False),
    (4096, 64, 512, True, "last", True),
    (4096, 128, 64, True, "first", False),
    (4096, 64, 128, False, "first", False),
    *((tokens, 64, 512, True, "last", in_place) for tokens in (128, 1) for in_place in (False, True)),
    *((tokens, 128, 64, True, "first", False) for tokens in (128, 1)),
]


def case(tokens: int, heads: int, channels: int, interleaved: bool, dims: str, in_place: bool) -> Case:

    kind = {"interleaved": interleaved, "dims": dims}
    inputs = fresh(2 * tokens * heads * channels, lambda: (bf16(tokens, heads, channels), *angles(tokens, ROTATED)))
    pairs = "neighbours" if interleaved else "halves"
    return Case(
        f"{tokens} x {heads} x {channels} bf16, {dims} {ROTATED} in {pairs}{', in place' if in_place else ''}",
        {
            "dsa": [partial(dsa.apply_rotary, *i, **kind, out=i[0] if in_place else None) for i in inputs],
            **over(inputs, {"formula": partial(reference.apply_rotary, **kind)}),
        },
        bytes_rate(2 * 2 * tokens * heads * (ROTATED if in_place else channels) + 2 * 4 * tokens * ROTATED // 2),
        graph=True,
        baselines={"formula"},
    )
