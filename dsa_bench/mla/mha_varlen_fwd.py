"""Multi-head attention over packed sequences, to all causal keys and to 2048 selected keys. The peer is cuDNN's
attention to all keys, if all tokens are new. With selected keys it is only a yardstick. For V3.2 our absorbed attention
to the selected keys is a second yardstick."""

from functools import partial
from types import ModuleType

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import dsa
from dsa_bench.harness.case import Call, Case, Peers, agree, bf16, bf16_gemm, flop_rate
from dsa_bench.peers.package import Library

V32, GLM5 = (128, 192, 128), (64, 256, 256)
TOP_K = 2048
CUDNN, ABSORBED = Library("cuDNN", ("torch",)), "absorbed, 2048 keys"
# sequences, tokens per sequence, new tokens per sequence; heads, d, dv; whether keys are selected
SHAPES = [
    *((*sizes, *V32, selecting) for sizes in ((1, 4096, 4096), (1, 8192, 8192)) for selecting in (False, True)),
    *((*sizes, *V32, False) for sizes in ((64, 512, 512), (256, 100, 100), (16, 2000, 2000))),
    (4, 3000, 3000, *V32, True),
    (1, 8192, 2048, *V32, True),
    *((1, 8192, 8192, *GLM5, selecting) for selecting in (False, True)),
    (64, 512, 512, *GLM5, False),
]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def _cudnn(module: ModuleType, *arguments: torch.Tensor | float) -> Call:
    """Return a call of cuDNN's causal attention of q, k, v [sequences, heads, tokens, channels].

    Raises RuntimeError if this build of torch has no such kernel.
    """
    call = partial(_attend, *arguments)
    call()
    return call


def case(sequences: int, keys: int, new: int, heads: int, d: int, dv: int, selecting: bool) -> Case:
    queries, rows, scale = sequences * new, sequences * keys, d**-0.5
    q, k, v = bf16(queries, heads, d), bf16(rows, heads, d), bf16(rows, heads, dv)
    cu_q, cu_k = (torch.arange(0, n + 1, each, device="cuda").int() for n, each in ((queries, new), (rows, keys)))
    visible = (keys - new + 1 + torch.arange(new, device="cuda")).repeat(sequences).int()
    attend, peers = partial(dsa.mha_varlen_fwd, q, k, v, cu_q, cu_k, keys, scale), Peers()
    calls = {"dsa": [attend]}
    name = f"{sequences} x {keys}" + (f", last {new}" if new < keys else "")
    name += f", {heads} heads of {d}/{dv}" + (f", {TOP_K} keys selected" if selecting else "")
    if new == keys:
        by_sequence = [x.view(sequences, keys, *x.shape[1:]).transpose(1, 2) for x in (q, k, v)]
        peers = Peers.of({CUDNN: _cudnn}, [(*by_sequence, scale)])
    if selecting:
        starts = torch.arange(sequences, device="cuda").repeat_interleave(new).int() * keys
        indices = _selected(visible, keys)
        lists = torch.where(indices < 0, indices, indices + starts[:, None])
        bits = dsa.selection_bits(lists, starts, keys)
        calls = {"dsa": [partial(attend, selected=bits, dense_keys=TOP_K)]}
        if (heads, d, dv) == V32:
            calls[ABSORBED] = [
                partial(
                    dsa.flash_mla_sparse_fwd,
                    *(bf16(queries, heads, 576), bf16(rows, 1, 576), lists[:, None], scale, 512),
                    topk_length=(indices >= 0).sum(-1).int(),
                )
            ]
    # cuDNN's result is [sequences, heads, tokens, dv], ours [all tokens, heads, dv].
    return Case(
        name,
        calls,
        flop_rate(2 * int(visible.sum()) * heads * (d + dv), bf16_gemm),
        peers,
        yardsticks={ABSORBED, CUDNN.name} if selecting else set(),
        agree=lambda theirs, ours: agree(theirs.transpose(1, 2).flatten(0, 1), ours),
    )


def _selected(visible: torch.Tensor, keys: int) -> torch.Tensor:
    """Return int32 [queries, TOP_K]: different random keys below visible[t] for query t, then -1. keys: the largest of
    `visible`."""
    chunks = []
    for count in visible.split(1024):
        scores = torch.rand(len(count), max(keys, TOP_K), device="cuda")
        column = torch.arange(scores.shape[1], device="cuda")
        best = scores.masked_fill(column >= count[:, None], -1.0).topk(TOP_K)
        chunks.append(best.indices.where(best.values >= 0, -1).int())
    return torch.cat(chunks)
