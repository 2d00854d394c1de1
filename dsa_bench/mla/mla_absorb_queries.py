"""W_UK absorbed into the queries: bytes of FP8 weights per second, compared with bmm with bf16 weights and rope."""

from functools import partial

import torch

import dsa
from dsa_bench.harness.case import Case, plain_rate

# tokens, heads, nope, rows of a head in kv_b: V3.2's, GLM-5's, and the share of one of eight GPUs
V32, GLM_5 = (128, 128, 256), (64, 192, 448)
SHAPES = [(tokens, *of_model) for of_model in (V32, GLM_5) for tokens in (1, 8, 16, 32, 64)] + [(1, 16, *V32[1:])]
LATENT, ROPE = 512, 64
APART = "bmm and rope"
_LAYERS = 8  # whose weights are used in turn, so that none is in the L2 cache


def _apart(q: torch.Tensor, nope: int, cos: torch.Tensor, sin: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
    out = q.new_empty(*q.shape[:2], LATENT + ROPE)
    torch.bmm(q[..., :nope].transpose(0, 1), w_uk, out=out[..., :LATENT].transpose(0, 1))
    dsa.apply_rotary(q[..., nope:], cos, sin, interleaved=True, out=out[..., LATENT:])
    return out


def case(tokens: int, heads: int, nope: int, rows: int) -> Case:
    q = torch.randn(tokens, heads, nope + ROPE, device="cuda").bfloat16()
    angles = torch.randn(tokens, ROPE // 2, device="cuda")
    cos, sin = angles.cos(), angles.sin()
    layers = [
        dsa.per_block_cast_to_fp8(torch.randn(heads * rows, LATENT, device="cuda") * LATENT**-0.5)
        for _ in range(_LAYERS)
    ]
    dequantised = [dsa.dequantize_per_block(*w, torch.bfloat16).unflatten(0, (heads, rows))[:, :nope] for w in layers]

    calls = {
        "dsa": [partial(dsa.mla_absorb_queries, q[..., :nope], q[..., nope:], cos, sin, w) for w in layers],
        APART: [partial(_apart, q, nope, cos, sin, w) for w in dequantised],
    }
    name = f"{tokens} tokens, {heads} heads, {nope} x {LATENT}"
    figure = plain_rate(heads * nope * LATENT, of=" of weights")
    return Case(name, calls, figure, graph=True, baselines=frozenset({APART}))
