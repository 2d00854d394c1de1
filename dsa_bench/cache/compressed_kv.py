"""The compressor in one kernel, compared with separate operations (torch's pooling, norm and rope, then our write)."""

from functools import partial

import torch

import dsa
from dsa_bench.harness.agreement import agree
from dsa_bench.harness.calls import Call
from dsa_bench.harness.case import Case, bytes_rate, fresh

# new tokens of each sequence, sequences; channels, tokens of a block, the cache's layout
SHAPES = [
    (16384, 1, 512, 4, "v4"),
    (16384, 1, 512, 128, "v4"),
    (16384, 1, 128, 4, "index"),
    (1, 64, 512, 4, "v4"),
    (1, 64, 512, 128, "v4"),
    (1, 64, 128, 4, "index"),
    (1, 1, 512, 4, "v4"),
    (1, 1, 512, 128, "v4"),
    (1, 1, 128, 4, "index"),
]
PAGE, EARLIER = 64, 1023


def _pages(count: int, d: int, layout: str) -> torch.Tensor:
    if layout == "v4":
        return dsa.make_v4_cache(count, PAGE, "cuda")
    return torch.zeros(count, PAGE, 1, d + 4, dtype=torch.uint8, device="cuda")


def _calls(tokens: int, sequences: int, d: int, m: int, layout: str) -> tuple[Call, Call]:
    overlap, total = m == 4, tokens * sequences
    c, n = (2 * d, 2 * m) if overlap else (d, m)
    kv, gate = (torch.randn(total, c, device="cuda") for _ in range(2))
    ape, weight = torch.randn(m, c, device="cuda"), torch.rand(d, device="cuda")
    angles = torch.randn(total, 32, device="cuda")
    cos, sin = angles.cos(), angles.sin()
    start = EARLIER if tokens == 1 else 0  # a single token ends its block
    ends = torch.arange(start, start + tokens).repeat(sequences).cuda() % m == m - 1
    slots = torch.where(ends, ends.cumsum(0) - 1, -1)
    pages = -(-int(ends.sum()) // PAGE)
    own, apart = (_pages(pages, d, layout) for _ in range(2))  # each writes to its own, as their contents are compared
    cu = torch.arange(0, total + 1, tokens, dtype=torch.int32, device="cuda")
    starts = torch.full((sequences,), start, dtype=torch.int32, device="cuda")
    state = torch.randn(sequences, n, 2, c, device="cuda")
    state_slots = torch.arange(sequences, dtype=torch.int32).cuda()
    rows = ends.nonzero().view(-1)
    written = slots[rows]

    def separately() -> torch.Tensor:
        if tokens == 1:
            state[:, start % n, 0], state[:, start % n, 1] = kv, gate + ape[start % m]
            k, z = state.unbind(2)
            if overlap:
                k, z = (torch.cat((x[:, :m, :d], x[:, m:, d:]), 1) for x in (k, z))
        else:
            k, z = kv.unflatten(0, (-1, m)), (gate.unflatten(0, (-1, m)) + ape)
            if overlap:
                k, z = (torch.cat((x[:, :, :d].roll(1, 0), x[:, :, d:]), 1) for x in (k, z))
        entry = (z.softmax(1) * k).sum(1)
        row = entry * torch.rsqrt(entry.square().mean(-1, keepdim=True) + 1e-6) * weight
        row = dsa.apply_rotary(row, cos[rows], sin[rows], interleaved=True, dims="last")
        if layout == "index":
            k8, scale = dsa.per_token_cast_to_fp8(row, True, hadamard=True)
            dsa.write_indexer_cache(k8, scale.squeeze(-1), apart, written)
        else:
            dsa.write_kv_cache(row, apart, written)
        return apart

    inputs = (kv, gate, ape, weight, cos, sin, own, slots, cu, starts, state, state_slots)

    def in_one() -> torch.Tensor:
        dsa.write_compressed_kv(*inputs, overlap=overlap)
        return own

    return in_one, separately


def case(tokens: int, sequences: int, d: int, m: int, layout: str) -> Case:
    c = 2 * d if m == 4 else d
    read = tokens * sequences * 2 * c * 4 if tokens > 1 else sequences * (2 * m if m == 4 else m) * 2 * d * 4
    size = read + tokens * sequences // (m if tokens > 1 else 1) * (584 if layout == "v4" else d + 4)
    ours, separate = map(list, zip(*fresh(size, partial(_calls, tokens, sequences, d, m, layout), most=16)))
    name = f"{sequences} x {tokens} tokens, {d} channels of {m}, {layout}"
    calls, baselines = {"dsa": ours, "separate": separate}, frozenset({"separate"})

    def agree_on_pages(theirs: torch.Tensor, own: torch.Tensor) -> None:
        # A prompt's first entry has no block before it: the separate operations give it the last one.
        first = 1 if tokens > 1 else 0
        slots = torch.arange(first, sequences * tokens // m if tokens > 1 else sequences, device=own.device)
        read = dsa.read_indexer_cache if layout == "index" else partial(dsa.read_kv_cache, dtype=torch.bfloat16)
        agree(*(read(pages, slots) for pages in (theirs, own)))

    return Case(name, calls, bytes_rate(size), graph=True, baselines=baselines, agree=agree_on_pages)
