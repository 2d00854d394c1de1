"""The product of attention's result with W_UV, and its cast to FP8, in one op: bytes of FP8 weights per second,
compared with torch's bmm with bf16 weights followed by our cast."""

from functools import partial

import torch

import dsa
from dsa_bench.harness.case import Case, Scaled, bf16, plain_rate
from dsa_bench.mla._kv_b import LATENT, layers

# tokens, heads, value channels per head, rows per head in kv_b: V3.2, GLM-5, and V3.2 split over eight GPUs
V32, GLM_5 = (128, 128, 256), (64, 256, 448)
SHAPES = [(tokens, *of_model) for of_model in (V32, GLM_5) for tokens in (1, 8, 16, 32, 64)] + [(1, 16, *V32[1:])]
APART = "bmm and cast"


def _apart(attended: torch.Tensor, w_uv: torch.Tensor) -> Scaled:
    y = attended.new_empty(*attended.shape[:2], w_uv.shape[1])
    torch.bmm(attended.transpose(0, 1), w_uv.mT, out=y.transpose(0, 1))
    return dsa.per_token_cast_to_fp8(y.flatten(1))


def case(tokens: int, heads: int, v_dim: int, rows: int) -> Case:
    attended = bf16(tokens, heads, LATENT)
    weights, values = layers(heads, rows, slice(-v_dim, None))
    return Case(
        f"{tokens} tokens, {heads} heads, {v_dim} x {LATENT}",
        {
            "dsa": [partial(dsa.mla_values_cast_to_fp8, attended, w, v_dim) for w in weights],
            APART: [partial(_apart, attended, w) for w in values],
        },
        plain_rate(heads * v_dim * LATENT, of=" of weights"),
        graph=True,
        baselines={APART},
    )
