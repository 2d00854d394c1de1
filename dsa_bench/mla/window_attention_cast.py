"""V4's attention in prefill with its result rotated back and cast to FP8, in one op.

It is compared with separate attention, rotation and cast. The separate attention is ours or FlashMLA's.
"""

from collections.abc import Sequence
from functools import partial

import torch

import dsa
from dsa.testing import calc_diff
from dsa_bench.harness.case import Case, Scaled, bf16_gemm, flop_rate
from dsa_bench.mla._windows import SCALE, WINDOW, D, Prompt
from dsa_bench.peers import flash_mla

# tokens, heads, groups, selected entries per token: layers of V4-Flash (64 heads) and V4-Pro. 0: a layer with windows
# only
SHAPES = [(4096, 64, 8, 512), (4096, 128, 16, 512), (16384, 64, 8, 512), (4096, 64, 8, 0)]
PROBED = [(512, 64, 8, 128)]
ROTATED = 64


def case(tokens: int, heads: int, groups: int, selected: int) -> Case:
    packed, near, compressed, indices, listed, pairs = Prompt.of(tokens, heads, selected)
    angles = torch.rand(tokens, ROTATED // 2, device="cuda") * 100
    cos, sin, back = angles.cos(), angles.sin(), -angles.sin()
    places = torch.arange(tokens * groups, device="cuda").int().view(groups, tokens).T.reshape(-1, 1)

    def rotate_and_cast(results: Sequence[torch.Tensor]) -> Scaled:
        out = results[0]
        dsa.apply_rotary(out, cos, back, interleaved=True, dims="last", out=out)
        return dsa.scatter_cast_to_fp8(out.view(tokens * groups, -1), places)

    def apart() -> Scaled:
        if compressed is None:
            return rotate_and_cast(dsa.sliding_window_attention(*packed, SCALE, indices=near))
        return rotate_and_cast(dsa.window_sparse_attention(*packed, compressed, indices, SCALE, window_indices=near))

    return Case(
        f"{tokens} tokens, {heads} heads in {groups} groups, window {WINDOW}, {selected or 'none'} selected",
        {
            "dsa": [
                partial(
                    dsa.window_attention_cast_to_fp8,
                    *(*packed, compressed, indices, cos, sin, groups, SCALE),
                    window_indices=near,
                )
            ],
            "apart": [apart],
        },
        flop_rate(2 * pairs * heads * 2 * D, bf16_gemm),
        flash_mla.sparse_prefill([listed]).then(rotate_and_cast),
        repeats=15,
        yardsticks={"apart"},
        agree=_agree,
    )


def _agree(theirs: Scaled, ours: Scaled) -> None:
    """Compare with tolerances. A sum in another order can round to another bf16 number, which differs by up to 2^-7 of
    the largest values. This can change an e4m3 number to the adjacent one, or the scale to the next power of two."""
    values = [q.float().unflatten(1, (-1, 128)) * scale[..., None] for q, scale in (theirs, ours)]
    step = torch.maximum(theirs[1], ours[1])[..., None]
    assert ((values[0] - values[1]).abs() <= values[1].abs() / 7 + step * 4).all()
    assert calc_diff(*values) < 2e-3
