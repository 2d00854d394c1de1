"""Attention to windows of 128 latents, compared with FlashMLA over the same keys as lists: prefill, prefill with
selected keys in the same softmax, and decoding from V4's cache.

The timing includes making our lists, but not making FlashMLA's. With selected keys (compressed entries), FlashMLA gets
the windows' keys and the entries in one tensor. The yardstick is then our attention in two branches, one to the window
and one to the selected entries, whose results are merged.

Without selected keys the yardstick is torch's flash attention with the same window. It accepts heads of at most 256
channels, and ours have 512. So compare the rates of the yardstick and of our op, not their times. A rate counts the
FLOP of the pairs inside the window with the kernel's number of channels.
"""

from functools import partial

import torch

import dsa
from dsa_bench.harness.case import Call, Case, agree_attention, bf16, bf16_gemm, copies, flop_rate, over
from dsa_bench.mla._windows import SCALE, WINDOW, D, Prompt
from dsa_bench.peers import flash_mla

# what; tokens of the one sequence (prefill) or number of sequences (decode); heads
SHAPES = [
    *(("prefill", tokens, heads) for tokens in (16384, 4096) for heads in (128, 64)),
    *(("prefill, 512 selected", 4096, heads) for heads in (128, 64)),
    *(("decode", 64, heads) for heads in (128, 64)),
]
PROBED = [("prefill", 512, 64), ("prefill, 512 selected", 2048, 64), ("decode", 4, 64)]
SELECTED, PAGE, KEYS = 512, 64, 1024
FLASH, FLASH_D, MERGED = "torch flash, d 256", 256, "two branches merged"
YARDSTICKS = {FLASH, MERGED}


def _flash(batch: int, queries: int, keys: int, heads: int, count: int = 1) -> dict[str, list[Call]]:
    """Return {FLASH: `count` calls over different inputs}, or {} if this build of torch has no flash attention. k and v
    are one tensor with one head, as with latents."""
    calls = []
    for _ in range(count):
        q, kv = bf16(batch, queries, heads, FLASH_D) / 10, bf16(batch, keys, 1, FLASH_D) / 10
        arguments = (q, *2 * (kv.expand(-1, -1, heads, -1),), None, None, queries, keys, 0.0, False, False)
        calls.append(
            partial(
                torch.ops.aten._flash_attention_forward,
                *arguments,
                window_size_left=WINDOW - 1,
                window_size_right=0,
            )
        )
    try:
        calls[0]()
    except RuntimeError:
        return {}
    return {FLASH: calls}


def _prefill(tokens: int, heads: int, selected: int) -> Case:
    prompt = Prompt.of(tokens, heads, selected)
    chosen, flops = "", {}
    if selected:
        chosen, entries = f"{selected} selected, ", (prompt.compressed, prompt.indices)
        ours = partial(dsa.window_sparse_attention, *prompt.packed, *entries, SCALE)
        others = {MERGED: [partial(_merged, prompt.packed, *entries)]}
    else:
        ours, others = partial(dsa.sliding_window_attention, *prompt.packed, SCALE), _flash(1, tokens, tokens, heads)
        flops = {FLASH: 2 * prompt.pairs * heads * 2 * FLASH_D}
    return Case(
        f"prefill of {tokens}, {chosen}{heads} heads, window {WINDOW}",
        {"dsa": [ours], **others},
        flop_rate(2 * prompt.pairs * heads * 2 * D, bf16_gemm),
        flash_mla.sparse_prefill([prompt.listed]),
        repeats=15,
        yardsticks=YARDSTICKS,
        flops=flops,
        agree=agree_attention,
    )


def _merged(packed: tuple, compressed: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    near, near_lse = dsa.sliding_window_attention(*packed, SCALE)
    far, _, far_lse = dsa.flash_mla_sparse_fwd(packed[0], compressed, indices[:, None], SCALE)
    return dsa.merge_attention([near, far], [near_lse, far_lse])


def _decode(batch: int, heads: int) -> Case:
    count = copies(batch * (WINDOW * 584 + heads * 2 * 2 * D), most=1 << 16, total=150e6)
    pages = batch * KEYS // PAGE
    kv = dsa.make_v4_cache(count * pages, PAGE, "cuda")
    for part in torch.arange(count * pages * PAGE, device="cuda").split(2**16):
        dsa.write_kv_cache(bf16(len(part), D) / 10, kv, part)
    lengths = torch.full((batch,), KEYS, dtype=torch.int32, device="cuda")
    tables = torch.randperm(count * pages, device="cuda").int().view(count, batch, -1)
    inputs = [(bf16(batch, 1, heads, D) / 10, kv, table, lengths, WINDOW, SCALE) for table in tables]
    slots = [dsa.window_slots(table, lengths, 1, PAGE, WINDOW) for table in tables]
    flops = 2 * batch * WINDOW * heads * 2 * D
    return Case(
        f"decode B {batch}, {heads} heads, window {WINDOW}, 584 bytes a key",
        over(inputs, {"dsa": partial(dsa.sliding_window_decode, is_fp8_kvcache=True)})
        | _flash(batch, 1, KEYS, heads, count),
        lambda ms: f"{ms * 1e3:.1f} us, {flops / (ms * 1e-3) / 1e12:.0f} TFLOP/s",
        flash_mla.sparse_decode([(q, kv, slot) for (q, *_), slot in zip(inputs, slots)]),
        graph=True,
        yardsticks=YARDSTICKS,
        flops={FLASH: flops // D * FLASH_D},
        agree=agree_attention,
    )


def case(what: str, count: int, heads: int) -> Case:
    if what == "decode":
        return _decode(count, heads)
    return _prefill(count, heads, SELECTED if "selected" in what else 0)
