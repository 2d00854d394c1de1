"""V4's attention in prefill with its result rotated back and cast to FP8, compared with attention, rotation and cast
one after the other, by our ops and with FlashMLA's attention."""

from collections.abc import Sequence
from functools import partial

import torch

import dsa
from dsa.testing import calc_diff
from dsa_bench.harness.case import Case, bf16_gemm, flop_rate
from dsa_bench.peers import flash_mla

# tokens, heads, groups, selected entries: V4-Flash's layers and V4-Pro's
SHAPES = [(4096, 64, 8, 512), (4096, 128, 16, 512), (16384, 64, 8, 512), (4096, 64, 8, 0)]
PROBED = [(512, 64, 8, 128)]
D, WINDOW, ROTATED = 512, 128, 64
Cast = tuple[torch.Tensor, torch.Tensor]


def case(tokens: int, heads: int, groups: int, selected: int) -> Case:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) / 10

    q, kv, ends = random(tokens, heads, D), random(tokens, 1, D), torch.tensor([0, tokens]).int().cuda()
    near = dsa.window_indices(ends, ends, tokens, WINDOW)
    angles = torch.rand(tokens, ROTATED // 2, device="cuda") * 100
    cos, sin, back = angles.cos(), angles.sin(), -angles.sin()
    compressed = indices = None
    keys, lists, pairs = kv, near, tokens * WINDOW - WINDOW * (WINDOW - 1) // 2
    if selected:
        compressed = random(tokens // 4, 1, D)
        indices = torch.rand(tokens, tokens // 4, device="cuda").topk(selected, dim=1).indices.int()
        keys, lists = torch.cat((kv, compressed)), torch.cat((near, indices + tokens), 1)
        pairs += tokens * selected
    places = torch.arange(tokens * groups, device="cuda").int().view(groups, tokens).T.reshape(-1, 1)

    def rotate_and_cast(results: Sequence[torch.Tensor]) -> Cast:
        out = results[0]
        dsa.apply_rotary(out, cos, back, interleaved=True, dims="last", out=out)
        return dsa.scatter_cast_to_fp8(out.view(tokens * groups, -1), places)

    packed = q, kv, ends, ends, WINDOW

    def apart() -> Cast:
        if compressed is None:
            return rotate_and_cast(dsa.sliding_window_attention(*packed, D**-0.5, indices=near))
        return rotate_and_cast(dsa.window_sparse_attention(*packed, compressed, indices, D**-0.5, window_indices=near))

    arguments = *packed, compressed, indices, cos, sin, groups, D**-0.5
    calls = {"dsa": [partial(dsa.window_attention_cast_to_fp8, *arguments, window_indices=near)], "apart": [apart]}
    peers = flash_mla.sparse_prefill([(q, keys, lists[:, None], D**-0.5)]).then(rotate_and_cast)
    name = f"{tokens} tokens, {heads} heads in {groups} groups, window {WINDOW}, {selected or 'none'} selected"
    others = {"yardsticks": frozenset({"apart"}), "agree": _agree}
    return Case(name, calls, flop_rate(2 * pairs * heads * 2 * D, bf16_gemm), peers, repeats=15, **others)


def _agree(theirs: Cast, ours: Cast) -> None:
    """Another order of sums may round to another bf16, off by up to 2^-7 of the largest values, and so to the next e4m3
    number, or change the scale to the next power of two."""
    values = [q.float().unflatten(1, (-1, 128)) * scale[..., None] for q, scale in (theirs, ours)]
    step = torch.maximum(theirs[1], ours[1])[..., None]
    assert ((values[0] - values[1]).abs() <= values[1].abs() / 7 + step * 4).all()
    assert calc_diff(*values) < 2e-3
