"""mla_values_cast_to_fp8 on the GPU: attended latents times W_UV (the rows of kv_b for values), cast to FP8. Nearly all
bytes are those of torch.bmm followed by the cast."""

import pytest
import torch

import dsa
from tests.gpu.attention import case_of, checked
from tests.gpu.op_checks import assert_equal, assert_rows_stand_alone, assert_same_bits, replays

CASE = case_of("mla_values_cast_to_fp8")
# (heads, value channels, rows of kv_b per head): V3.2, GLM-5, both on one of 8 GPUs. In the last two, heads begin at
# rows that are multiples of 32 but not of 64 or 128.
HEADS = [(128, 128, 256), (64, 256, 448), (16, 128, 256), (8, 256, 448), (5, 128, 160), (3, 256, 288)]
by_scales = pytest.mark.parametrize("use_ue8m0", [True, False])


def inputs(tokens, heads, v_dim, rows, use_ue8m0=True):
    return CASE.arguments("cuda", tokens=tokens, heads=heads, v_dim=v_dim, rows=rows, use_ue8m0=use_ue8m0)


def weights(given):
    """Return W_UV as bf16 [heads, v_dim, 512]."""
    whole = dsa.dequantize_per_block(*given["kv_b"], torch.bfloat16)
    return whole.unflatten(0, (given["attended"].shape[1], -1))[:, -given["v_dim"] :]


@by_scales
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 32, 100])
@pytest.mark.parametrize("heads, v_dim, rows", HEADS)
def test_values_are_right(tokens, heads, v_dim, rows, use_ue8m0, record_error):
    checked(CASE, inputs(tokens, heads, v_dim, rows, use_ue8m0), record_error)


@by_scales
@pytest.mark.parametrize("heads, v_dim, rows", HEADS[:2])
def test_nearly_all_bytes_are_those_of_bmm_and_the_cast(heads, v_dim, rows, use_ue8m0):
    given = inputs(16, heads, v_dim, rows, use_ue8m0)
    q, scale = CASE.run(given)
    y = torch.bmm(given["attended"].transpose(0, 1), weights(given).mT).transpose(0, 1)
    expected, scales = dsa.per_token_cast_to_fp8(y.flatten(1), use_ue8m0)
    same = scale == scales
    assert same.float().mean() > 0.9
    bytes_differ = q.view(torch.uint8).view(*scale.shape, 128) != expected.view(torch.uint8).view(*scale.shape, 128)
    assert bytes_differ[same].float().mean() < 0.02


@by_scales
@pytest.mark.parametrize("value", [2.0**-9, 0.0, 448.0, -448.0])
def test_the_cast_of_a_single_weight_is_exact(value, use_ue8m0):
    """One latent channel of each token is 1 and the others are 0, so the values must equal dequantised weights."""
    given = inputs(64, 4, 128, 256, use_ue8m0)
    weight, attended = given["kv_b"][0], given["attended"]
    weight.view(-1)[::7] = torch.tensor(value, device="cuda").to(weight.dtype)
    for first in range(0, 512, 64):
        attended.zero_()
        attended[torch.arange(64), :, torch.arange(first, first + 64)] = 1
        y = weights(given)[..., first : first + 64].permute(2, 0, 1).reshape(64, 512)
        assert_equal(CASE.run(given), dsa.per_token_cast_to_fp8(y, use_ue8m0))


def test_a_token_does_not_depend_on_the_others():
    given, parts = inputs(33, 128, 128, 256), [slice(5, 6), slice(3, 12), slice(8, 20), slice(1, 33)]
    whole = assert_rows_stand_alone(CASE.run, given, ("attended",), parts)
    given["attended"][0], given["attended"][20] = torch.nan, torch.inf
    q, scale = CASE.run(given)
    for others in (slice(1, 20), slice(21, 33)):
        assert_same_bits((q[others], scale[others]), [x[others] for x in whole])
    assert scale[0].isnan().all() and q[0].float().isnan().all() and not scale[20].isfinite().any()


def test_a_graph_reads_what_the_kernel_before_has_written():
    given = inputs(2, 128, 128, 256)

    def after_a_kernel(attended):
        return CASE.run(given | {"attended": attended * 1})

    for got in replays(after_a_kernel, (given["attended"],), lambda: torch.randn_like(given["attended"])):
        assert_same_bits(got, CASE.run(given))
