"""W_UV applied and cast to FP8: bytes of FP8 weights per second, compared with bmm with bf16 weights and the cast."""

from functools import partial

import torch

import dsa
from dsa_bench.harness.case import Case, plain_rate

# tokens, heads, value channels, rows of a head in kv_b: V3.2's, GLM-5's, and the share of one of eight GPUs
V32, GLM_5 = (128, 128, 256), (64, 256, 448)
SHAPES = [(tokens, *of_model) for of_model in (V32, GLM_5) for tokens in (1, 8, 16, 32, 64)] + [(1, 16, *V32[1:])]
LATENT = 512
APART = "bmm and cast"
_LAYERS = 8  # whose weights are used in turn, so that none is in the L2 cache


def _apart(attended: torch.Tensor, w_uv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = attended.new_empty(*attended.shape[:2], w_uv.shape[1])
    torch.bmm(attended.transpose(0, 1), w_uv.mT, out=y.transpose(0, 1))
    return dsa.per_token_cast_to_fp8(y.flatten(1))


def case(tokens: int, heads: int, v_dim: int, rows: int) -> Case:
    attended = torch.randn(tokens, heads, LATENT, device="cuda").bfloat16()
    layers = [
        dsa.per_block_cast_to_fp8(torch.randn(heads * rows, LATENT, device="cuda") * LATENT**-0.5)
        for _ in range(_LAYERS)
    ]
    dequantised = [dsa.dequantize_per_block(*w, torch.bfloat16).unflatten(0, (heads, rows))[:, -v_dim:] for w in layers]

    calls = {
        "dsa": [partial(dsa.mla_values_cast_to_fp8, attended, w, v_dim) for w in layers],
        APART: [partial(_apart, attended, w) for w in dequantised],
    }
    name = f"{tokens} tokens, {heads} heads, {v_dim} x {LATENT}"
    figure = plain_rate(heads * v_dim * LATENT, of=" of weights")
    return Case(name, calls, figure, graph=True, baselines=frozenset({APART}))
