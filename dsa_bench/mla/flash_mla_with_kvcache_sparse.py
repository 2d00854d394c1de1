"""MLA decoding over selected keys of an FP8 cache (656 bytes per token) compared with both builds of FlashMLA, which
accept only 64 and 128 heads. For them, 16 and 32 heads are padded to 64 outside the timing.

Each sequence has a part of one cache and selects random keys of this part. Every call of a graph uses other parts.
"""

from functools import partial

import torch

import dsa
from dsa_bench.harness.case import Case, agree_attention, bf16, copies, nearer_rate
from dsa_bench.peers import flash_mla

# sequences, heads, query tokens, selected keys, keys per sequence
SHAPES = [
    (128, 128, 2, 2048, 32768),
    (64, 128, 2, 2048, 32768),
    (2, 128, 2, 2048, 32768),
    *((batch, 128, queries, 2048, 32768) for queries in (3, 4) for batch in (128, 64, 2)),
    *((128, 64, 4, selected, 32768) for selected in (512, 2048)),
    (128, 128, 1, 2048, 32768),
    (128, 64, 1, 2048, 32768),
    (1, 128, 1, 2048, 131072),
    *((batch, heads, 1, 2048, 32768) for heads in (16, 32) for batch in (128, 2)),
    *((128, heads, 1, selected, 32768) for heads in (64, 128) for selected in (512, 1024)),
]
PROBED = [(4, 64, 1, 512, 4096), (2, 128, 2, 2048, 4096), (2, 16, 1, 512, 4096)]
D, D_V, PAGE, BYTES = 576, 512, 64, 656


def _cache(rows: int) -> torch.Tensor:
    """Return an FP8 cache of `rows` latents. To limit the memory for bf16 latents, 65536 random ones repeat."""
    block = torch.empty(65536 // PAGE, PAGE, 1, BYTES, dtype=torch.uint8, device="cuda")
    dsa.write_kv_cache(bf16(65536, D) / 10, block, torch.arange(65536, device="cuda"))
    return block.repeat(-(-rows // 65536), 1, 1, 1)[: rows // PAGE]


def _inputs(
    kv: torch.Tensor, first: int, batch: int, heads: int, queries: int, selected: int, keys: int
) -> tuple[torch.Tensor, ...]:
    """Return (q, kv, indices int32 [batch, queries, selected]). Sequence i selects from slots (first + i) * keys to
    (first + i + 1) * keys - 1."""
    chosen = torch.rand(batch, queries, keys, device="cuda").topk(selected, dim=2).indices
    indices = (chosen + (first + torch.arange(batch, device="cuda"))[:, None, None] * keys).int()
    return bf16(batch, queries, heads, D) / 10, kv, indices


def case(batch: int, heads: int, queries: int, selected: int, keys: int) -> Case:
    size = batch * queries * selected * BYTES
    count = copies(size, least=1, most=32, total=150e6)
    kv = _cache(count * batch * keys)
    inputs = [_inputs(kv, i * batch, batch, heads, queries, selected, keys) for i in range(count)]
    return Case(
        f"B {batch}, {heads} heads, s_q {queries}, k {selected}, {keys} keys",
        {
            "dsa": [
                partial(
                    *(dsa.flash_mla_with_kvcache, q, kv, None, None, D_V, dsa.get_mla_metadata()[0], None),
                    is_fp8_kvcache=True,
                    indices=indices,
                )
                for q, kv, indices in inputs
            ]
        },
        nearer_rate(size, 2 * batch * queries * selected * heads * (D + D_V)),
        flash_mla.sparse_decode(inputs),
        graph=True,
        agree=agree_attention,
    )
