"""The compressor in one kernel, compared with separate operations: pooling and norm in torch, then our rotation, cast
and write."""

from functools import partial

import torch

import dsa
from dsa_bench.cache._pages import PAGE, empty_bytes, same_contents
from dsa_bench.harness.case import Call, Case, angles, bytes_rate, f32, fresh_calls, into

# new tokens per sequence, sequences; channels, tokens per block, layout of the cache of entries ("index": index keys)
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
EARLIER = 1023  # cached tokens before a single new token, which then ends a block of 4 and of 128


def _calls(tokens: int, sequences: int, d: int, m: int, layout: str) -> dict[str, Call]:
    overlap, total = m == 4, tokens * sequences
    c, n = (2 * d, 2 * m) if overlap else (d, m)
    kv, gate, ape, weight = f32(total, c), f32(total, c), f32(m, c), torch.rand(d, device="cuda")
    cos, sin = angles(total)
    start = EARLIER if tokens == 1 else 0
    ends = torch.arange(start, start + tokens).repeat(sequences).cuda() % m == m - 1
    slots = torch.where(ends, ends.cumsum(0) - 1, -1)
    pages = -(-int(ends.sum()) // PAGE)
    # Separate caches, because their contents are compared.
    cache, apart = (
        dsa.make_v4_cache(pages, PAGE, "cuda") if layout == "v4" else empty_bytes(pages, d + 4) for _ in range(2)
    )
    cu = torch.arange(0, total + 1, tokens, dtype=torch.int32, device="cuda")
    starts = torch.full((sequences,), start, dtype=torch.int32, device="cuda")
    state = f32(sequences, n, 2, c)
    state_slots = torch.arange(sequences, dtype=torch.int32).cuda()
    rows = ends.nonzero().view(-1)
    written = slots[rows]

    def separately() -> torch.Tensor:
        if tokens == 1:
            state[:, start % n, 0], state[:, start % n, 1] = kv, gate + ape[start % m]
            blocks = [(x[:, :m], x[:, -m:]) for x in state.unbind(2)]
        else:
            blocks = [(x.roll(1, 0), x) for x in (kv.unflatten(0, (-1, m)), gate.unflatten(0, (-1, m)) + ape)]
        k, z = (torch.cat((past[..., :d], x[..., d:]), 1) if overlap else x for past, x in blocks)
        entry = (z.softmax(1) * k).sum(1)
        row = entry * torch.rsqrt(entry.square().mean(-1, keepdim=True) + 1e-6) * weight
        row = dsa.apply_rotary(row, cos[rows], sin[rows], interleaved=True, dims="last")
        if layout == "index":
            k8, scale = dsa.per_token_cast_to_fp8(row, True, hadamard=True)
            dsa.write_indexer_cache(k8, scale.squeeze(-1), apart, written)
        else:
            dsa.write_kv_cache(row, apart, written)
        return apart

    inputs = (kv, gate, ape, weight, cos, sin, cache, slots, cu, starts, state, state_slots)
    return {
        "dsa": partial(into, cache, partial(dsa.write_compressed_kv, *inputs, overlap=overlap)),
        "separate": separately,
    }


def case(tokens: int, sequences: int, d: int, m: int, layout: str) -> Case:
    c = 2 * d if m == 4 else d
    read = tokens * sequences * 2 * c * 4 if tokens > 1 else sequences * (2 * m if m == 4 else m) * 2 * d * 4
    size = read + tokens * sequences // (m if tokens > 1 else 1) * (584 if layout == "v4" else d + 4)

    # With 4 tokens per block an entry also reads the block before it. A prompt's first block has none, where the
    # separate operations use the last block instead. So a prompt's first entry is not compared.
    first, entries = (1, sequences * tokens // m) if tokens > 1 else (0, sequences)
    read = dsa.read_indexer_cache if layout == "index" else partial(dsa.read_kv_cache, dtype=torch.bfloat16)
    return Case(
        f"{sequences} x {tokens} tokens, {d} channels of {m}, {layout}",
        fresh_calls(size, partial(_calls, tokens, sequences, d, m, layout), most=16),
        bytes_rate(size),
        graph=True,
        baselines={"separate"},
        agree=same_contents(read, torch.arange(first, entries, device="cuda")),
    )
