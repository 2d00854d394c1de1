"""W_UK absorbed into the queries, on the GPU: the numbers of bmm with dequantised weights, and rope's bits."""

import pytest
import torch

import dsa
from dsa.testing import assert_close, poison_free_memory

# heads, nope, rows of a head: V3.2's, GLM-5's, a GPU's share of each, heads that begin at multiples of 32 rows
HEADS = [(128, 128, 256), (64, 192, 448), (16, 128, 256), (8, 192, 448), (5, 128, 160), (3, 192, 224)]


def operands(tokens, heads, nope, rows):
    """q as a layer has it; weights whose blocks differ in size; every scale has all of its bits."""
    q = torch.randn(tokens, heads, nope + 64, device="cuda").bfloat16()
    angles = torch.randn(tokens, 32, device="cuda") * 100
    weight = torch.randn(heads * rows, 512, device="cuda") * 512**-0.5
    weight *= torch.logspace(-2, 1, heads * rows, device="cuda")[:, None]
    return q[..., :nope], q[..., nope:], angles.cos(), angles.sin(), dsa.per_block_cast_to_fp8(weight, use_ue8m0=False)


def up_projection(kv_b, heads, nope):
    return dsa.dequantize_per_block(*kv_b, torch.bfloat16).unflatten(0, (heads, -1))[:, :nope]


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 17, 32, 100])
@pytest.mark.parametrize("heads, nope, rows", HEADS)
def test_against_float64(tokens, heads, nope, rows, record_error):
    given = q_nope, q_pe, cos, sin, kv_b = operands(tokens, heads, nope, rows)
    poison_free_memory(mebibytes=64)
    got = dsa.mla_absorb_queries(*given)
    w = up_projection(kv_b, heads, nope).double()
    expected = torch.einsum("thd,hdc->thc", q_nope.double(), w)
    size = torch.einsum("thd,hdc->thc", q_nope.double().abs(), w.abs())
    error = (got[..., :512].double() - expected).abs()
    record_error((error / size).max())
    # The result is rounded once; a sum of fp32 is off by far less.
    assert (error <= expected.abs() * 2**-8 + size * 2**-18).all()
    assert torch.equal(got[..., 512:], dsa.apply_rotary(q_pe, cos, sin, interleaved=True))


@pytest.mark.parametrize("heads, nope, rows", HEADS[:2])
def test_within_summation_order_of_bmm(heads, nope, rows):
    q_nope, *rest, kv_b = operands(16, heads, nope, rows)
    got = dsa.mla_absorb_queries(q_nope, *rest, kv_b)[..., :512]
    expected = torch.bmm(q_nope.transpose(0, 1), up_projection(kv_b, heads, nope)).transpose(0, 1)
    assert (got != expected).float().mean() < 0.02  # those that lie between two numbers of bf16
    assert_close("q", got, expected, abs_tol=1e-3, rel_tol=2**-7, cos_tol=5e-6)


@pytest.mark.parametrize("value", [2.0**-9, 0.0, 448.0, -448.0, 1.125 * 2.0**-6])
def test_every_weight_is_what_dequantising_gives(value):
    """One channel of a token is 1: a result is a weight, to the bit. Subnormals and the largest numbers of e4m3."""
    q_nope, q_pe, cos, sin, (weight, scale) = operands(32, 4, 128, 256)
    weight.view(-1)[::7] = torch.tensor(value, device="cuda").to(weight.dtype)
    for first in range(0, 128, 32):
        q_nope.zero_()
        q_nope[torch.arange(32), :, torch.arange(first, first + 32)] = 1
        got = dsa.mla_absorb_queries(q_nope, q_pe, cos, sin, (weight, scale))[..., :512]
        expected = up_projection((weight, scale), 4, 128)[:, first : first + 32].transpose(0, 1)
        assert torch.equal(got, expected)


def test_a_token_does_not_depend_on_the_others():
    q_nope, q_pe, cos, sin, kv_b = operands(33, 128, 128, 256)
    whole = dsa.mla_absorb_queries(q_nope, q_pe, cos, sin, kv_b)
    q_nope[0], q_nope[20] = torch.nan, torch.inf
    for part in (slice(5, 6), slice(3, 12), slice(8, 20), slice(1, 20), slice(21, 33)):
        got = dsa.mla_absorb_queries(q_nope[part], q_pe[part], cos[part], sin[part], kv_b)
        assert torch.equal(got, whole[part])
    beside = dsa.mla_absorb_queries(q_nope, q_pe, cos, sin, kv_b)
    assert torch.equal(beside[1:20], whole[1:20]) and torch.equal(beside[21:], whole[21:])
    assert beside[0, :, :512].isnan().all() and not beside[20, :, :512].isfinite().any()


def test_heads_that_are_apart():
    """Tokens and heads at any strides of 16 bytes."""
    q_nope, q_pe, cos, sin, kv_b = operands(9, 4, 128, 256)
    expected = dsa.mla_absorb_queries(q_nope, q_pe, cos, sin, kv_b)
    wide = [torch.full((9, 5, 3, 200), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    views = [x[:, :4, 1, 8 : 8 + part.shape[2]] for x, part in zip(wide, (q_nope, q_pe))]
    for view, part in zip(views, (q_nope, q_pe)):
        view.copy_(part)
    angles = [torch.cat((x, x), 1)[:, :32] for x in (cos, sin)]
    assert torch.equal(dsa.mla_absorb_queries(*views, *angles, kv_b), expected)


def test_in_a_cuda_graph():
    given = operands(2, 128, 128, 256)
    expected = dsa.mla_absorb_queries(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # What the kernel in front has written is read.
        got = dsa.mla_absorb_queries(given[0] * 1, *given[1:])
        again = dsa.mla_absorb_queries(got[..., :128] * 0 + given[0], *given[1:])
    for _ in range(3):
        graph.replay()
        assert torch.equal(got, expected) and torch.equal(again, expected)
