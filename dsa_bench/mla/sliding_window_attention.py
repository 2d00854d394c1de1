"""Attention to windows of 128 latents, compared with FlashMLA over the same keys as lists: prefill, prefill with
selected keys in the same softmax, decoding from V4's cache.

FlashMLA's lists are made outside the timing, ours inside; with selected keys it gets both kinds in one tensor.
Yardsticks are torch's flash attention with the same window, and our two branches merged. Flash attention's heads have
at most 256 channels, all of which it scores and sums: compare rates, the FLOP of the pairs inside the window by the
channels of each.
"""

from functools import partial

import torch

import dsa
from dsa_bench.harness.agreement import agree_attention
from dsa_bench.harness.calls import Call, over
from dsa_bench.harness.case import Case, bf16_gemm, copies, flop_rate
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


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) / 10


def _flash(batch: int, queries: int, keys: int, heads: int, count: int = 1) -> dict[str, list[Call]]:
    """Calls with one key head, expanded, as the latents are shared; none where this build of torch does not have it."""
    calls = []
    for _ in range(count):
        q, kv = _random(batch, queries, heads, FLASH_D), _random(batch, keys, 1, FLASH_D).expand(-1, -1, heads, -1)
        arguments = (q, kv, kv, None, None, queries, keys, 0.0, False, False)
        window = {"window_size_left": WINDOW - 1, "window_size_right": 0}
        calls.append(partial(torch.ops.aten._flash_attention_forward, *arguments, **window))
    try:
        calls[0]()
    except RuntimeError:
        return {}
    return {FLASH: calls}


def _prefill(tokens: int, heads: int, selected: int) -> Case:
    q, kv, ends = _random(tokens, heads, D), _random(tokens, 1, D), torch.tensor([0, tokens]).int().cuda()
    arguments = (q, kv, ends, ends, WINDOW)
    near = dsa.window_indices(ends, ends, tokens, WINDOW)
    pairs = tokens * WINDOW - WINDOW * (WINDOW - 1) // 2 + tokens * selected
    figure = flop_rate(2 * pairs * heads * 2 * D, bf16_gemm)
    others = {"repeats": 15, "yardsticks": YARDSTICKS, "agree": agree_attention}
    if not selected:
        peers = flash_mla.sparse_prefill([(q, kv, near[:, None], D**-0.5)])
        calls = {"dsa": [partial(dsa.sliding_window_attention, *arguments, D**-0.5)]}
        calls |= _flash(1, tokens, tokens, heads)
        others["flops"] = {FLASH: 2 * pairs * heads * 2 * FLASH_D}
        return Case(f"prefill of {tokens}, {heads} heads, window {WINDOW}", calls, figure, peers, **others)

    compressed = _random(tokens // 4, 1, D)
    indices = torch.rand(tokens, tokens // 4, device="cuda").topk(selected, dim=1).indices.int()
    keys, lists = torch.cat((kv, compressed)), torch.cat((near, indices + tokens), 1)
    peers = flash_mla.sparse_prefill([(q, keys, lists[:, None], D**-0.5)])
    calls = {
        "dsa": [partial(dsa.window_sparse_attention, *arguments, compressed, indices, D**-0.5)],
        MERGED: [partial(_merged, arguments, compressed, indices)],
    }
    name = f"prefill of {tokens}, {selected} selected, {heads} heads, window {WINDOW}"
    return Case(name, calls, figure, peers, **others)


def _merged(arguments: tuple, compressed: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    near, near_lse = dsa.sliding_window_attention(*arguments, D**-0.5)
    far, _, far_lse = dsa.flash_mla_sparse_fwd(arguments[0], compressed, indices[:, None], D**-0.5)
    return dsa.merge_attention([near, far], [near_lse, far_lse])


def _decode(batch: int, heads: int) -> Case:
    moved = batch * (WINDOW * 584 + heads * 2 * 2 * D)
    count = copies(moved, most=1 << 16, total=150e6)
    pages = batch * KEYS // PAGE
    kv = dsa.make_v4_cache(count * pages, PAGE, "cuda")
    for part in torch.arange(count * pages * PAGE, device="cuda").split(2**16):
        dsa.write_kv_cache(_random(len(part), D), kv, part)
    lengths = torch.full((batch,), KEYS, dtype=torch.int32, device="cuda")
    tables = torch.randperm(count * pages, device="cuda").int().view(count, batch, -1)
    inputs = [(_random(batch, 1, heads, D), kv, table, lengths, WINDOW, D**-0.5) for table in tables]
    calls = over(inputs, {"dsa": partial(dsa.sliding_window_decode, is_fp8_kvcache=True)})
    calls |= _flash(batch, 1, KEYS, heads, count)
    slots = [dsa.window_slots(table, lengths, 1, PAGE, WINDOW) for table in tables]
    peers = flash_mla.sparse_decode([(q, kv, slot) for (q, *_), slot in zip(inputs, slots)])
    flops = 2 * batch * WINDOW * heads * 2 * D

    def figure(ms: float) -> str:
        return f"{ms * 1e3:.1f} us, {flops / (ms * 1e-3) / 1e12:.0f} TFLOP/s"

    name = f"decode B {batch}, {heads} heads, window {WINDOW}, 584 bytes a key"
    others = {"flops": {FLASH: flops // D * FLASH_D}, "yardsticks": YARDSTICKS, "agree": agree_attention}
    return Case(name, calls, figure, peers, graph=True, **others)


def case(what: str, count: int, heads: int) -> Case:
    if what == "decode":
        return _decode(count, heads)
    return _prefill(count, heads, SELECTED if "selected" in what else 0)
