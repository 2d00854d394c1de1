"""mla_absorb_queries on the GPU. Products of queries and W_UK (the rows of kv_b for keys) are near torch.bmm. The rope
channels have the bits of apply_rotary."""

import pytest
import torch

import dsa
from dsa.testing import assert_close
from tests.gpu.attention import case_of, checked
from tests.gpu.op_checks import assert_rows_stand_alone, assert_same_bits, replays

CASE = case_of("mla_absorb_queries")
# (heads, channels without rope, rows of kv_b per head): V3.2, GLM-5, both on one of 8 GPUs. In the last two, heads
# begin at rows that are multiples of 32 but not of 64 or 128.
HEADS = [(128, 128, 256), (64, 192, 448), (16, 128, 256), (8, 192, 448), (5, 128, 160), (3, 192, 224)]


def inputs(tokens, heads, nope, rows):
    return CASE.arguments("cuda", tokens=tokens, heads=heads, nope=nope, rows=rows)


def weights(given):
    """Return W_UK as bf16 [heads, nope, 512]."""
    _, heads, nope = given["q_nope"].shape
    return dsa.dequantize_per_block(*given["kv_b"], torch.bfloat16).unflatten(0, (heads, -1))[:, :nope]


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 32, 100])
@pytest.mark.parametrize("heads, nope, rows", HEADS)
def test_latent_queries_are_the_products_and_rope_is_rotated(tokens, heads, nope, rows, record_error):
    given = inputs(tokens, heads, nope, rows)
    (got,) = checked(CASE, given, record_error)
    assert_same_bits(got[..., 512:], dsa.apply_rotary(given["q_pe"], given["cos"], given["sin"], interleaved=True))
    if tokens == 32:
        by_bmm = torch.bmm(given["q_nope"].transpose(0, 1), weights(given)).transpose(0, 1)
        assert_close("q", got[..., :512], by_bmm, abs_tol=1e-3, rel_tol=2**-7, cos_tol=5e-6)
        # The kernel and bmm add in different orders. A sum near the middle between two bf16 numbers can round either
        # way.
        assert (got[..., :512] != by_bmm).float().mean() < 0.02


@pytest.mark.parametrize("value", [2.0**-9, 0.0, 448.0, -448.0, 1.125 * 2.0**-6])
def test_every_weight_is_what_dequantising_gives(value):
    """One channel of each token's q_nope is 1 and the others are 0, so each result must equal a dequantised weight."""
    given = inputs(32, 4, 128, 256)
    weight, q_nope = given["kv_b"][0], given["q_nope"]
    weight.view(-1)[::7] = torch.tensor(value, device="cuda").to(weight.dtype)
    for first in range(0, 128, 32):
        q_nope.zero_()
        q_nope[torch.arange(32), :, torch.arange(first, first + 32)] = 1
        (got,) = CASE.run(given)
        assert torch.equal(got[..., :512], weights(given)[:, first : first + 32].transpose(0, 1))


def test_a_token_does_not_depend_on_the_others():
    given, parts = inputs(33, 128, 128, 256), [slice(5, 6), slice(3, 12), slice(8, 20), slice(21, 33)]
    whole = assert_rows_stand_alone(CASE.run, given, ("q_nope", "q_pe", "cos", "sin"), parts)
    given["q_nope"][0], given["q_nope"][20] = torch.nan, torch.inf
    (got,) = CASE.run(given)
    assert_same_bits((got[1:20], got[21:]), (whole[0][1:20], whole[0][21:]))
    assert got[0, :, :512].isnan().all() and not got[20, :, :512].isfinite().any()


def test_a_graph_reads_what_the_kernel_before_has_written():
    q_nope, *given = inputs(2, 128, 128, 256).values()

    def both(q_nope):
        got = dsa.mla_absorb_queries(q_nope * 1, *given)
        return got, dsa.mla_absorb_queries(got[..., :128] * 0 + q_nope, *given)

    for got in replays(both, (q_nope,), lambda: torch.randn_like(q_nope)):
        assert_same_bits(got, (dsa.mla_absorb_queries(q_nope, *given),) * 2)
