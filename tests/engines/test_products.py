"""Products of FP8 and FP4 weights, compared with formulas in float64."""

import pytest
import torch

import dsa
from dsa_engines import products

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
EXPERTS, HIDDEN, INNER = 3, 256, 128


def fp8_weights(*shape):
    """Return (e4m3 weights, fp32 scales of blocks of 128 x 128, the weights in float64)."""
    weight = torch.randint(-8, 9, shape).to(torch.float8_e4m3fn)
    scale = torch.exp2(torch.randint(-9, -6, (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))).float())
    wide = scale.double().repeat_interleave(128, -2).repeat_interleave(128, -1)
    return weight, scale, weight.double() * wide[..., : shape[-2], : shape[-1]]


def fp4_weights(*shape):
    """Return (packed bytes, e8m0 scales as bytes, the weights in float64)."""
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    scale = torch.randint(118, 121, (*shape[:-1], shape[-1] // 32), dtype=torch.uint8)
    wide = torch.exp2(scale.double() - 127).repeat_interleave(32, -1)
    return packed, scale, E2M1[codes.long()] * wide


def cast(x, use_ue8m0):
    """Return x in float64 after its cast to FP8."""
    q, scale = dsa.per_token_cast_to_fp8(x.bfloat16(), use_ue8m0)
    return q.double() * scale.double().repeat_interleave(128, -1)


def expected_of(x, experts, weights, gate_up, down, limit, use_ue8m0):
    """Return the sum over each token's experts in float64. Numbers outside [0, EXPERTS) are ignored."""
    out = torch.zeros(len(x), down.shape[1], dtype=torch.float64)
    for token, j in torch.cartesian_prod(torch.arange(len(x)), torch.arange(experts.shape[1])).tolist():
        expert = int(experts[token, j])
        if 0 <= expert < EXPERTS:
            gate, up = (gate_up[expert] @ cast(x[token], use_ue8m0)).bfloat16().double().chunk(2)
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            hidden = cast(torch.nn.functional.silu(gate) * up, use_ue8m0)
            out[token] += weights[token, j].double() * (down[expert] @ hidden)
    return out


def assert_near(found, expected, most=0.005):
    error = (found.double() - expected).norm() / expected.norm()
    assert error <= most, f"relative error {error:.2e}"


@pytest.mark.parametrize("shape", [(5, 256), (2, 3, 256), (1, 256), (0, 256)])
@pytest.mark.parametrize("rows", [128, 192])
def test_linear_is_exact_where_no_number_is_rounded(shape, rows):
    """Small integers are exact in FP8 with scales that are powers of two."""
    weight, scale, wide = fp8_weights(rows, 256)
    x = torch.randint(-8, 9, shape).bfloat16()
    y = products.linear(x, weight, scale, use_ue8m0=True)
    assert y.dtype == torch.bfloat16 and y.shape == (*shape[:-1], rows)
    assert torch.equal(y, (x.double() @ wide.T).bfloat16())


@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_linear_casts_tokens_with_the_scales_asked_for(use_ue8m0):
    weight, scale, wide = fp8_weights(256, 256)
    x = torch.randn(7, 256).bfloat16()
    assert_near(products.linear(x, weight, scale, use_ue8m0), cast(x, use_ue8m0) @ wide.T)


@pytest.mark.parametrize("limit", [None, 0.25])
@pytest.mark.parametrize("use_ue8m0", [False, True])
@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_routed_experts(kind, use_ue8m0, limit):
    make = fp8_weights if kind == "fp8" else fp4_weights
    gate_up, down = make(EXPERTS, 2 * INNER, HIDDEN), make(EXPERTS, HIDDEN, INNER)
    tokens, chosen = 6, 3
    x = torch.randn(tokens, HIDDEN).bfloat16()
    # Experts of other GPUs are numbers outside [0, EXPERTS). The last token has no other ones.
    experts = torch.randint(-1, EXPERTS + 1, (tokens, chosen))
    experts[:2], experts[-1] = torch.tensor([[0, 1, 2], [-1, 2, 7]]), torch.tensor([-1, EXPERTS, 99])
    weights = torch.rand(tokens, chosen)
    if kind == "fp8":
        pairs = gate_up[:2], down[:2]
    else:
        pairs = [products.fp4_weights(*w[:2], products.fp4_block_scales(*w[:2])) for w in (gate_up, down)]
    for numbers in (experts.int(), experts):
        out = products.routed_experts(x, numbers, weights, *pairs, limit, use_ue8m0)
        assert out.dtype == torch.bfloat16 and not out[-1].any()
        expected = expected_of(x, experts, weights, gate_up[2], down[2], limit, use_ue8m0)
        assert_near(out[:-1], expected[:-1])
        for token in range(tokens):
            one = slice(token, token + 1)
            alone = products.routed_experts(x[one], numbers[one], weights[one], *pairs, limit, use_ue8m0)
            assert torch.equal(alone, out[one])
