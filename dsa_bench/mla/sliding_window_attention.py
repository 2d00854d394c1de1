"""Attention to windows of 128 latents, beside FlashMLA over the same keys as lists: prefill, prefill with selected keys
in the same softmax, decoding from V4's cache.

FlashMLA's lists are made outside the timing, ours inside; with selected keys it gets both kinds in one tensor. For
scale, torch's flash attention with the same window, and two branches of ours merged. Flash attention's heads have at
most 256 channels, of which it scores and sums all: rates are what to compare, FLOP of the pairs inside the window by
the channels that each has.
"""

from collections.abc import Callable
from functools import cache, partial

import torch

import dsa
from dsa.testing import assert_close, bf16_gemm_rate
from dsa_bench.harness.agreement import agree_attention
from dsa_bench.harness.case import Call, Case
from dsa_bench.peers import flash_mla

# what; tokens of one sequence, or sequences; heads
SHAPES = [
    *(("prefill", tokens, heads) for tokens in (16384, 4096) for heads in (128, 64)),
    *(("prefill, 512 selected", 4096, heads) for heads in (128, 64)),
    *(("decode", 64, heads) for heads in (128, 64)),
]
PROBED = [("prefill", 512, 64), ("prefill, 512 selected", 2048, 64), ("decode", 4, 64)]
D, WINDOW, SELECTED, PAGE, KEYS = 512, 128, 512, 64, 1024
FLASH, FLASH_D, MERGED = "torch flash, d 256", 256, "two branches merged"
YARDSTICKS = frozenset({FLASH, MERGED})
_FRESH_BYTES = 150e6  # of keys and queries in a graph: more than the L2 cache holds
_gemm = cache(bf16_gemm_rate)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) / 10


def _flash(batch: int, queries: int, keys: int, heads: int) -> dict[str, Call]:
    """One key head, expanded, as the latents are shared."""
    q, kv = _random(batch, queries, heads, FLASH_D), _random(batch, keys, 1, FLASH_D).expand(-1, -1, heads, -1)
    call = partial(
        torch.ops.aten._flash_attention_forward,
        *(q, kv, kv, None, None, queries, keys, 0.0, False, False),
        window_size_left=WINDOW - 1,
        window_size_right=0,
    )
    try:
        call()
    except RuntimeError:  # a build without it
        return {}
    return {FLASH: call}


def _rate(flops: float) -> Callable[[float], str]:
    def figure(ms: float) -> str:
        rate = flops / (ms * 1e-3)
        return f"{rate / 1e12:.0f} TFLOP/s, {rate / _gemm():.0%} of bf16 GEMM"

    return figure


def _close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert_close("out", got, expected, abs_tol=1e-3, rel_tol=3.01 / 128, cos_tol=7e-6)


def _prefill(tokens: int, heads: int, selected: int) -> Case:
    selects = selected > 0
    q, kv, ends = _random(tokens, heads, D), _random(tokens, 1, D), torch.tensor([0, tokens]).int().cuda()
    arguments = (q, kv, ends, ends, WINDOW)
    pairs = tokens * WINDOW - WINDOW * (WINDOW - 1) // 2
    near = dsa.window_indices(ends, ends, tokens, WINDOW)
    if selects:
        compressed = _random(tokens // 4, 1, D)
        indices = torch.rand(tokens, tokens // 4, device="cuda").topk(selected, dim=1).indices.int()
        peers = flash_mla.sparse_prefill(
            [(q, torch.cat((kv, compressed)), torch.cat((near, indices + tokens), 1)[:, None], D**-0.5)]
        )
        calls: dict[str, list[Call]] = {
            "dsa": [partial(dsa.window_sparse_attention, *arguments, compressed, indices, D**-0.5)],
            MERGED: [partial(_merged, arguments, compressed, indices)],
        }
        pairs += tokens * selected
    else:
        peers = flash_mla.sparse_prefill([(q, kv, near[:, None], D**-0.5)])
        calls = {"dsa": [partial(dsa.sliding_window_attention, *arguments, D**-0.5)]}
        calls |= {name: [call] for name, call in _flash(1, tokens, tokens, heads).items()}

    def check(got: tuple[torch.Tensor, torch.Tensor]) -> None:
        # The last queries, whose keys are the last.
        last, few = torch.tensor([0, 64]).int().cuda(), torch.tensor([0, 512]).int().cuda()
        some = (q[-64:].float(), kv[-512:], last, few, WINDOW)
        with dsa.use_backend("reference"):
            if selects:
                expected = dsa.window_sparse_attention(*some, compressed, indices[-64:], D**-0.5)
            else:
                expected = dsa.sliding_window_attention(*some, D**-0.5)
        _close(got[0][-64:], expected[0])

    name = f"prefill of {tokens}{f', {selected} selected' if selects else ''}, {heads} heads, window {WINDOW}"
    flops = {} if selects else {FLASH: 2 * pairs * heads * 2 * FLASH_D}
    others = {"yardsticks": YARDSTICKS, "flops": flops, "failed": peers.failed, "agree": agree_attention}
    return Case(name, calls | peers.calls, _rate(2 * pairs * heads * 2 * D), check, repeats=15, **others)


def _merged(arguments: tuple, compressed: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    near, near_lse = dsa.sliding_window_attention(*arguments, D**-0.5)
    far, _, far_lse = dsa.flash_mla_sparse_fwd(arguments[0], compressed, indices[:, None], D**-0.5)
    return dsa.merge_attention([near, far], [near_lse, far_lse])


def _decode(batch: int, heads: int) -> Case:
    moved = batch * (WINDOW * 584 + heads * 2 * 2 * D)
    count = int(_FRESH_BYTES // moved) + 1
    pages = batch * KEYS // PAGE
    kv = dsa.make_v4_cache(count * pages, PAGE, "cuda")
    for part in torch.arange(count * pages * PAGE, device="cuda").split(2**16):
        dsa.write_kv_cache(_random(len(part), D), kv, part)
    lengths = torch.full((batch,), KEYS, dtype=torch.int32, device="cuda")
    tables = torch.randperm(count * pages, device="cuda").int().view(count, batch, -1)
    inputs = [(_random(batch, 1, heads, D), kv, table, lengths, WINDOW, D**-0.5) for table in tables]
    decode = partial(dsa.sliding_window_decode, is_fp8_kvcache=True)
    calls: dict[str, list[Call]] = {"dsa": [partial(decode, *i) for i in inputs]}
    slots = [dsa.window_slots(table, lengths, 1, PAGE, WINDOW) for table in tables]
    peers = flash_mla.sparse_decode([(q, kv, slot) for (q, *_), slot in zip(inputs, slots)])
    if flash := _flash(batch, 1, KEYS, heads):
        calls[FLASH] = [flash[FLASH], *(_flash(batch, 1, KEYS, heads)[FLASH] for _ in range(count - 1))]
    pairs = batch * WINDOW

    def figure(ms: float) -> str:
        return f"{ms * 1e3:.1f} us, {2 * pairs * heads * 2 * D / (ms * 1e-3) / 1e12:.0f} TFLOP/s"

    def check(got: tuple[torch.Tensor, torch.Tensor]) -> None:
        q, _, table, length, *rest = inputs[0]
        with dsa.use_backend("reference"):
            expected = decode(q[:4].float(), kv, table[:4], length[:4], *rest)
        _close(got[0][:4], expected[0])

    name = f"decode B {batch}, {heads} heads, window {WINDOW}, 584 bytes a key"
    flops = {FLASH: 2 * pairs * heads * 2 * FLASH_D}
    others = {"yardsticks": YARDSTICKS, "flops": flops, "failed": peers.failed, "agree": agree_attention}
    return Case(name, calls | peers.calls, figure, check, graph=True, **others)


def case(what: str, count: int, heads: int) -> Case:
    if what == "decode":
        return _decode(count, heads)
    return _prefill(count, heads, SELECTED if "selected" in what else 0)
