"""The product of queries with W_UK, and the rope of queries, in one op: bytes of FP8 weights per second, compared with
torch's bmm with bf16 weights followed by our rope."""

from functools import partial

import torch

import dsa
from dsa_bench.harness.case import Case, angles, bf16, plain_rate
from dsa_bench.mla._kv_b import LATENT, layers

# tokens, heads, channels without rope per head (nope), rows per head in kv_b: V3.2, GLM-5, and V3.2 split over eight
# GPUs
V32, GLM_5 = (128, 128, 256), (64, 192, 448)
SHAPES = [(tokens, *of_model) for of_model in (V32, GLM_5) for tokens in (1, 8, 16, 32, 64)] + [(1, 16, *V32[1:])]
ROPE = 64
APART = "bmm and rope"


def _apart(q: torch.Tensor, nope: int, cos: torch.Tensor, sin: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
    out = q.new_empty(*q.shape[:2], LATENT + ROPE)
    torch.bmm(q[..., :nope].transpose(0, 1), w_uk, out=out[..., :LATENT].transpose(0, 1))
    dsa.apply_rotary(q[..., nope:], cos, sin, interleaved=True, out=out[..., LATENT:])
    return out


def case(tokens: int, heads: int, nope: int, rows: int) -> Case:
    q, (cos, sin) = bf16(tokens, heads, nope + ROPE), angles(tokens, ROPE)
    weights, values = layers(heads, rows, slice(nope))
    return Case(
        f"{tokens} tokens, {heads} heads, {nope} x {LATENT}",
        {
            "dsa": [partial(dsa.mla_absorb_queries, q[..., :nope], q[..., nope:], cos, sin, w) for w in weights],
            APART: [partial(_apart, q, nope, cos, sin, w) for w in values],
        },
        plain_rate(heads * nope * LATENT, of=" of weights"),
        graph=True,
        baselines={APART},
    )
