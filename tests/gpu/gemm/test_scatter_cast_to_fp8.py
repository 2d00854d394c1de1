"""The scattered FP8 cast on the GPU: the bytes of the plain cast, at the rows of the tokens' experts."""

import pytest
import torch

import dsa
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import assert_same_bits


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens, channels, k", [(1, 128, 1), (3, 7168, 8), (257, 4096, 6), (4096, 640, 8)])
def test_bits(tokens, channels, k, dtype, use_ue8m0, record_error):
    x = (torch.randn(tokens, channels, device="cuda") * torch.logspace(-6, 4, channels, device="cuda")).to(dtype)
    experts = torch.rand(tokens, 16, device="cuda").argsort(-1)[:, :k]
    order, rows, _ = dsa.sort_by_expert(experts, 16)
    poison_free_memory(mebibytes=64)
    q, scale = dsa.scatter_cast_to_fp8(x, rows, use_ue8m0)
    expected_q, expected_scale = dsa.per_token_cast_to_fp8(x, use_ue8m0)
    sources = (order // k).long()
    record_error((q.float() - expected_q.float()[sources]).abs().max())
    assert_same_bits((q.view(torch.uint8), scale), (expected_q.view(torch.uint8)[sources], expected_scale[sources]))


def test_places_outside_are_not_written():
    x = torch.randn(64, 256, device="cuda").bfloat16()
    places = torch.arange(128, device="cuda", dtype=torch.int32).view(64, 2)
    places[::2, 0], places[1::4, 1], places[3::4, 1] = -1, 2**31 - 1, 128
    q, scale = dsa.scatter_cast_to_fp8(x, places)
    expected, scales = dsa.per_token_cast_to_fp8(x)
    inside = (places >= 0) & (places < 128)
    tokens, at = torch.arange(64, device="cuda")[:, None].expand(64, 2)[inside], places[inside].long()
    assert_same_bits((q.view(torch.uint8)[at], scale[at]), (expected.view(torch.uint8)[tokens], scales[tokens]))
