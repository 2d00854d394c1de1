"""Sparse MLA prefill compared with both builds of FlashMLA. Head counts that they do not accept are padded outside the
timing. Selections are random and independent; shapes with 8 and 16 heads are also timed with selections that overlap
like those of adjacent tokens. With up to 16 heads our op can compute several adjacent queries together. Then our kernel
that computes each query separately is a yardstick."""

from functools import partial

import torch

import dsa
from dsa.kernels.mla.limits import GROUP_SIZES
from dsa.ops.mla._sparse_attention import Results, Selection, attend
from dsa_bench.harness.case import Case, agree_attention, bf16, bf16_gemm, flop_rate, selected_keys
from dsa_bench.peers import flash_mla

# {layer: (apart, moved)} of an earlier shipped model. apart: fraction of a token's selected keys that at least one of
# NEIGHBOURS adjacent tokens does not select. moved: fraction of these keys that the next token does not select. 4
# adjacent tokens together select 1.38 times as many different keys as one token (layer 1: 2.17 times). 8 tokens select
# 1.57 times as many (layer 1: 3.10 times; docs/explanation/kernels.md). In the current shipped model these four figures
# are, in this order, 1.46, 2.11, 1.90 and 3.11.
OVERLAPS = {"layer 0": (0.22, 0.75), "layer 1": (0.525, 0.86)}
NEIGHBOURS = 64
# keys, d, heads, selected keys; queries (default QUERIES), overlap (a key of OVERLAPS; default: random selections)
SHAPES = [
    *(
        (keys, *shape)
        for shape in ((576, 128, 2048), (576, 64, 2048), (512, 64, 512), (512, 128, 1024))
        for keys in (32768, 8192, 131072)
    ),
    *((keys, 576, heads, 2048) for heads in (16, 32) for keys in (32768, 8192, 131072)),
    *((32768, 576, heads, selected) for heads in (64, 128) for selected in (512, 1024)),
    *((keys, 576, 8, 2048) for keys in (32768, 131072)),
    *(
        (keys, 576, heads, 2048, 4096, overlap)
        for heads in (16, 8)
        for overlap in ("layer 0", "layer 1")
        for keys in (32768, 131072)
    ),
]
PROBED = [(4096, 576, 64, 2048, 128), (4096, 512, 128, 512, 128), (4096, 576, 16, 512, 128)]
QUERIES, D_V = 4096, 512


def _indices(keys: int, selected: int, queries: int, overlap: str) -> torch.Tensor:
    if not overlap:
        return selected_keys(queries, keys, selected)
    apart, moved = OVERLAPS[overlap]
    different = round(selected * apart)
    candidates = round(different / (1 - moved))
    pool = selected_keys(queries // NEIGHBOURS, keys, selected - different + candidates)
    common, others = pool.repeat_interleave(NEIGHBOURS, 0).split((selected - different, candidates), 1)
    chosen = torch.rand(others.shape, device="cuda").topk(different, dim=1).indices
    whole = torch.cat((common, others.gather(1, chosen)), 1)
    return whole.gather(1, torch.rand(whole.shape, device="cuda").argsort(1))


def _one_by_one(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (out, max_logits, lse) of the kernel that computes each query separately."""
    max_logits, lse = (q.new_empty(q.shape[:2], dtype=torch.float32) for _ in range(2))
    out = q.new_empty(*q.shape[:2], D_V)
    attend(q, [Selection(kv, indices, None)], scale, None, Results(out, lse, max_logits), may_split=False)
    return out, max_logits, lse


def case(keys: int, d: int, heads: int, selected: int, queries: int = QUERIES, overlap: str = "") -> Case:
    indices = _indices(keys, selected, queries, overlap)
    inputs = bf16(queries, heads, d) / 10, bf16(keys, 1, d) / 10, indices[:, None].contiguous(), d**-0.5
    yardsticks = {"one by one"} if heads <= max(GROUP_SIZES) else set()
    return Case(
        f"{queries} queries, {keys} keys, d {d}, {heads} heads, k {selected}"
        + (f", overlap of {overlap}" if overlap else ""),
        {
            "dsa": [partial(dsa.flash_mla_sparse_fwd, *inputs)],
            **{y: [partial(_one_by_one, *inputs)] for y in yardsticks},
        },
        flop_rate(2 * queries * selected * heads * (d + D_V), bf16_gemm),
        flash_mla.sparse_prefill([inputs]),
        repeats=15,
        yardsticks=yardsticks,
        agree=agree_attention,
    )
