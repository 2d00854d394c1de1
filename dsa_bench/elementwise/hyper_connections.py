"""The kernels of hyper-connections, compared with tile-kernels and the formulas in PyTorch. Projection and collapse
together are also compared with DeepGEMM's projection followed by tile-kernels' collapse."""

from functools import partial

import torch

import dsa
from dsa import reference
from dsa_bench.elementwise.hyper_mix import OUTPUTS, matrix, product
from dsa_bench.harness.case import Case, bf16, bytes_case, f32
from dsa_bench.peers import hyper_connections as peers

# op, tokens, channels of a stream
SHAPES = [(op, tokens, d) for d in (4096, 7168) for tokens in (16384, 4096, 128, 1) for op in ("collapse", "expand")]
SHAPES += [(f"independent {op}", tokens, 2816) for tokens in (4096, 128, 1) for op in ("collapse", "expand")]
SHAPES += [("head", tokens, 4096) for tokens in (128, 1)]
SHAPES += [("mix and collapse", tokens, d) for d in (4096, 7168) for tokens in (16384, 4096, 128, 1)]
PROBED = [(op, 128, 4096) for op in ("collapse", "expand", "mix and collapse")]
_SIZES = {  # per token: number of rows of D bf16 channels, and of fp32 numbers, that are read and written
    "collapse": (5, OUTPUTS + 20),
    "expand": (9, 20),
    "independent collapse": (5, 12),
    "independent expand": (9, 4),
    "head": (5, 4),
    "mix and collapse": (9, 2 * OUTPUTS + 20),
}
Inputs = tuple[torch.Tensor, ...]


def _inputs(op: str, tokens: int, d: int) -> Inputs:
    streams = bf16(tokens, 4, d)
    if op == "collapse":
        return streams, f32(tokens, OUTPUTS), f32(OUTPUTS), f32(3)
    if op == "independent collapse":
        return streams, f32(tokens, 8), f32(8), f32(2)
    if op == "head":
        return streams, f32(tokens, 4), f32(4), f32(1)
    if op == "mix and collapse":
        return streams, (f32(3, OUTPUTS, 4 * d) * (4 * d) ** -0.5).bfloat16(), f32(OUTPUTS), f32(3)
    sizes = ((4,), (4, 4)) if op == "expand" else ((4,),)
    return bf16(tokens, d), streams, *(torch.rand(tokens, *size, device="cuda") for size in sizes)


_OPS = {  # op: (ours, the formula in PyTorch, the peers or None)
    "collapse": (dsa.hyper_collapse, reference.hyper_collapse, peers.collapse),
    "expand": (dsa.hyper_expand, reference.hyper_expand, peers.expand),
    "independent collapse": (dsa.hyper_collapse_independent, reference.hyper_collapse_independent, None),
    "independent expand": (dsa.hyper_expand, reference.hyper_expand, None),
    "head": (dsa.hyper_head, reference.hyper_head, None),
    "mix and collapse": (
        lambda streams, parts, *rest: dsa.hyper_collapse(streams, dsa.hyper_mix(streams, parts), *rest),
        lambda streams, parts, *rest: reference.hyper_collapse(streams, product(streams, parts), *rest),
        lambda inputs: peers.project_and_collapse((x, matrix(parts), *rest) for x, parts, *rest in inputs),
    ),
}


def case(op: str, tokens: int, d: int) -> Case:
    rows, numbers = _SIZES[op]
    ours, formula, of_peers = _OPS[op]
    size, functions = tokens * (2 * d * rows + 4 * numbers), {"dsa": ours, "torch": formula}
    name, inputs = f"{op} of {tokens} tokens, D {d}, bf16", partial(_inputs, op, tokens, d)
    return bytes_case(name, size, inputs, functions, of_peers, baselines={"torch"})
