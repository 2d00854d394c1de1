"""Dense MLA decoding compared with both builds of FlashMLA: the shapes of FlashMLA's tests, and small batches, where
latency counts."""

from functools import partial

import torch

import dsa
from dsa_bench.harness.case import Case, agree_attention, bf16, fresh, nearer_rate
from dsa_bench.peers import flash_mla

# sequences, keys per sequence, heads, query tokens
SHAPES = [
    *((128, 4096, heads, queries) for heads, queries in ((16, 1), (64, 1), (128, 1), (128, 2))),
    *((128, 16384, heads, queries) for heads, queries in ((16, 1), (64, 1), (64, 2), (128, 1), (128, 2))),
    *((128, 4096, heads, 1) for heads in (8, 32)),
    *((batch, keys, heads, 1) for batch in (1, 4, 16) for keys in (1024, 8192, 131072) for heads in (16, 64, 128)),
]
PROBED = [(4, 1024, 16, 1), (4, 1024, 128, 2)]
D, D_V, PAGE = 576, 512, 64


def _inputs(batch: int, keys: int, heads: int, queries: int) -> tuple[torch.Tensor, ...]:
    pages = -(-keys // PAGE)
    table = torch.randperm(batch * pages, device="cuda").int().view(batch, pages)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    return bf16(batch, queries, heads, D) / 10, bf16(batch * pages, PAGE, 1, D) / 10, table, lengths


def case(batch: int, keys: int, heads: int, queries: int) -> Case:
    # Every call of a graph has another cache and another plan. The first call with a plan fills it, before the capture.
    cache = batch * keys * D * 2
    inputs = fresh(cache, partial(_inputs, batch, keys, heads, queries), least=1, most=32, total=150e6)
    size = cache + batch * queries * heads * (D + D_V) * 2
    plans = [dsa.get_mla_metadata()[0] for _ in inputs]
    return Case(
        f"B {batch}, {keys} keys, {heads} heads, s_q {queries}",
        {"dsa": [partial(dsa.flash_mla_with_kvcache, *i, D_V, plan, causal=True) for i, plan in zip(inputs, plans)]},
        nearer_rate(size, 2 * batch * keys * heads * queries * (D + D_V)),
        flash_mla.dense_decode(inputs),
        graph=True,
        agree=agree_attention,
    )
