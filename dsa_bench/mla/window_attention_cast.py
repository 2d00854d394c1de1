"""V4's attention in prefill with its result turned back and cast to FP8, beside attention, rotation and cast one after
the other, by our ops and with FlashMLA's attention."""

from collections.abc import Callable
from functools import cache, partial

import torch

import dsa
from dsa.testing import bf16_gemm_rate, calc_diff
from dsa_bench.harness.case import Call, Case
from dsa_bench.peers import flash_mla

# tokens, heads, groups, selected entries: V4-Flash's layers and V4-Pro's
SHAPES = [(4096, 64, 8, 512), (4096, 128, 16, 512), (16384, 64, 8, 512), (4096, 64, 8, 0)]
PROBED = [(512, 64, 8, 128)]
D, WINDOW, ROTATED = 512, 128, 64
Cast = tuple[torch.Tensor, torch.Tensor]
_gemm = cache(bf16_gemm_rate)


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

    def turned_and_cast(out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dsa.apply_rotary(out, cos, back, interleaved=True, dims="last", out=out)
        return dsa.scatter_cast_to_fp8(out.view(tokens * groups, -1), places)

    def apart() -> tuple[torch.Tensor, torch.Tensor]:
        if compressed is None:
            out, _ = dsa.sliding_window_attention(q, kv, ends, ends, WINDOW, D**-0.5, indices=near)
        else:
            out, _ = dsa.window_sparse_attention(
                *(q, kv, ends, ends, WINDOW, compressed, indices, D**-0.5), window_indices=near
            )
        return turned_and_cast(out)

    def figure(ms: float) -> str:
        rate = 2 * pairs * heads * 2 * D / (ms * 1e-3)
        return f"{rate / 1e12:.0f} TFLOP/s, {rate / _gemm():.0%} of bf16 GEMM"

    def check(got: tuple[torch.Tensor, torch.Tensor]) -> None:
        assert all(torch.equal(g.view(torch.uint8), e.view(torch.uint8)) for g, e in zip(got, apart(), strict=True))

    fused = partial(
        *(dsa.window_attention_cast_to_fp8, q, kv, ends, ends, WINDOW, compressed, indices, cos, sin, groups, D**-0.5),
        window_indices=near,
    )
    peers = flash_mla.sparse_prefill([(q, keys, lists[:, None], D**-0.5)])
    theirs = {name: [partial(_then, call, turned_and_cast) for call in calls] for name, calls in peers.calls.items()}
    calls = {"dsa": [fused], "apart": [apart], **theirs}
    name = f"{tokens} tokens, {heads} heads in {groups} groups, window {WINDOW}, {selected or 'none'} selected"
    others = {"yardsticks": frozenset({"apart"}), "failed": peers.failed, "agree": _agree}
    return Case(name, calls, figure, check, repeats=15, **others)


def _then(call: Call, rest: Callable[[torch.Tensor], Cast]) -> Cast:
    return rest(call()[0])


def _agree(theirs: Cast, ours: Cast) -> None:
    """Sums in another order end in another bf16 now and then, by up to 2^-7 of the largest values, and so in the next
    number of e4m3, or with the next power of two as the scale."""
    values = [q.float().unflatten(1, (-1, 128)) * scale[..., None] for q, scale in (theirs, ours)]
    step = torch.maximum(theirs[1], ours[1])[..., None]
    assert ((values[0] - values[1]).abs() <= values[1].abs() / 7 + step * 4).all()
    assert calc_diff(*values) < 2e-3
