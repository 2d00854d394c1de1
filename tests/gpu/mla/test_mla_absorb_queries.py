"""W_UK absorbed into the queries, on the GPU: the numbers of bmm with dequantised weights, and rope's bits."""

import pytest
import torch

import dsa
from dsa.testing import assert_close, poison_free_memory
from tests.gpu.mla.up_projections import TOKENS, dequantized, product, projection, with_value
from tests.gpu.op_checks import assert_same_bits, replays

# heads, nope, rows of a head: V3.2's, GLM-5's, a GPU's share of each, heads that begin at multiples of 32 rows
HEADS = [(128, 128, 256), (64, 192, 448), (16, 128, 256), (8, 192, 448), (5, 128, 160), (3, 192, 224)]


def operands(tokens, heads, nope, rows):
    """q as a layer has it."""
    q = torch.randn(tokens, heads, nope + 64, device="cuda").bfloat16()
    angles = torch.randn(tokens, 32, device="cuda") * 100
    return q[..., :nope], q[..., nope:], angles.cos(), angles.sin(), projection(heads, rows)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("heads, nope, rows", HEADS)
def test_latent_queries_are_the_products_and_rope_is_rotated(tokens, heads, nope, rows, record_error):
    q_nope, q_pe, cos, sin, kv_b = operands(tokens, heads, nope, rows)
    poison_free_memory(mebibytes=64)
    got = dsa.mla_absorb_queries(q_nope, q_pe, cos, sin, kv_b)
    w = dequantized(kv_b, heads)[:, :nope]
    expected, bound, size = product("thd,hdc->thc", q_nope, w)
    error = (got[..., :512].double() - expected).abs()
    record_error((error / size).max())
    assert (error <= bound).all()
    assert_same_bits(got[..., 512:], dsa.apply_rotary(q_pe, cos, sin, interleaved=True))
    if tokens == 32:
        by_bmm = torch.bmm(q_nope.transpose(0, 1), w).transpose(0, 1)
        assert_close("q", got[..., :512], by_bmm, abs_tol=1e-3, rel_tol=2**-7, cos_tol=5e-6)
        # The two differ where a sum lies between two numbers of bf16.
        assert (got[..., :512] != by_bmm).float().mean() < 0.02


@pytest.mark.parametrize("value", [2.0**-9, 0.0, 448.0, -448.0, 1.125 * 2.0**-6])
def test_every_weight_is_what_dequantising_gives(value):
    """One channel of a token is 1: a result is a weight, to the bit. Subnormals and the largest numbers of e4m3."""
    q_nope, q_pe, cos, sin, kv_b = operands(32, 4, 128, 256)
    kv_b = with_value(kv_b, value)
    for first in range(0, 128, 32):
        q_nope.zero_()
        q_nope[torch.arange(32), :, torch.arange(first, first + 32)] = 1
        got = dsa.mla_absorb_queries(q_nope, q_pe, cos, sin, kv_b)[..., :512]
        assert torch.equal(got, dequantized(kv_b, 4)[:, first : first + 32].transpose(0, 1))


def test_a_token_does_not_depend_on_the_others():
    q_nope, q_pe, cos, sin, kv_b = operands(33, 128, 128, 256)
    whole = dsa.mla_absorb_queries(q_nope, q_pe, cos, sin, kv_b)
    q_nope[0], q_nope[20] = torch.nan, torch.inf
    for part in (slice(5, 6), slice(3, 12), slice(8, 20), slice(1, 20), slice(21, 33)):
        got = dsa.mla_absorb_queries(q_nope[part], q_pe[part], cos[part], sin[part], kv_b)
        assert_same_bits(got, whole[part])
    got = dsa.mla_absorb_queries(q_nope, q_pe, cos, sin, kv_b)
    assert_same_bits((got[1:20], got[21:]), (whole[1:20], whole[21:]))
    assert got[0, :, :512].isnan().all() and not got[20, :, :512].isfinite().any()


def test_a_graph_reads_what_the_kernel_before_has_written():
    q_nope, *given = operands(2, 128, 128, 256)

    def twice(q_nope):
        got = dsa.mla_absorb_queries(q_nope * 1, *given)
        return got, dsa.mla_absorb_queries(got[..., :128] * 0 + q_nope, *given)

    for got in replays(twice, (q_nope,), lambda: torch.randn_like(q_nope)):
        assert_same_bits(got, (dsa.mla_absorb_queries(q_nope, *given),) * 2)
