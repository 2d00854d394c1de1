"""Marlin's layout of FP4 weights, and the weighted sums of experts' outputs that Marlin's operators compute."""

import pytest
import torch

import dsa
from dsa.testing import calc_diff
from dsa_bench.peers import marlin
from tests.bench import marlin_stub


def fp4(count, rows, columns):
    weight = torch.randint(-128, 128, (count, rows, columns // 2), dtype=torch.int8)
    scale = torch.randint(110, 125, (count, rows, columns // 32), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return weight, scale


def widened(weight, scale):
    q, s = dsa.widen_fp4(weight, scale)
    return q.float() * s.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, : q.shape[1], : q.shape[2]]


@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (256, 128), (128, 320)])
def test_packed_weights_are_the_weights(rows, columns):
    weight, scale = fp4(3, rows, columns)
    packed = marlin.pack(weight, scale)
    assert packed.weight.shape == (3, columns // 16, 2 * rows) and packed.scale.shape == (3, columns // 32, rows)
    assert torch.equal(marlin_stub.unpacked(*packed), widened(weight, scale))


def test_the_places_of_codes_and_scales():
    """Computed by hand. A tile has 64 rows, 16 for each of four warps. Lane 5 multiplies rows 1 and 9 of a warp's 16
    rows, at channels 2, 3, 10 and 11. For the second warp, these are rows 17 and 25 of the tile. One word has the eight
    codes that the lane multiplies."""
    weight, scale = torch.zeros(1, 64, 8, dtype=torch.int8), torch.zeros(1, 64, 1, dtype=torch.uint8)
    for nibble, (row, channel) in enumerate(
        [(17, 2), (17, 10), (25, 2), (25, 10), (17, 3), (17, 11), (25, 3), (25, 11)]
    ):
        weight[0, row, channel // 2] += (nibble + 1) << 4 * (channel % 2)
    scale[0, :, 0] = torch.arange(64)
    words, scales = marlin.pack(weight.repeat(1, 1, 2), scale.view(torch.float8_e8m0fnu))
    assert words[0, 0].nonzero().flatten().tolist() == [5 * 4 + 1]
    assert words[0, 0, 21].item() & 0xFFFFFFFF == 0x87654321
    assert scales.view(torch.uint8)[0, 0, :9].tolist() == [0, 16, 8, 24, 32, 48, 40, 56, 1]


@pytest.mark.parametrize(("rows", "size"), [(1842, 8), (1844, 16), (10**6, 64)])
def test_a_block_is_the_smallest_that_an_experts_rows_do_not_fill(rows, size):
    assert marlin.block_size(rows, 256) == size


@pytest.mark.parametrize("tokens", [1, 8, 70])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_sums_of_experts_equal_those_of_widened_weights(tokens, limit, peers):
    marlin.MARLIN.load()
    gate_up, down = fp4(5, 256, 256), fp4(5, 256, 128)
    x, weights = torch.randn(tokens, 256, dtype=torch.bfloat16) / 10, torch.rand(tokens, 2)
    experts = torch.stack([torch.randperm(4)[:2] for _ in range(tokens)])  # no token has the last expert
    got = marlin.experts_sum(x, experts, weights, marlin.pack(*gate_up), marlin.pack(*down), limit)
    of_first, of_second = widened(*gate_up)[experts], widened(*down)[experts]
    gate, up = (of_first @ x.float()[:, None, :, None]).squeeze(-1).chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    outputs = (of_second @ (torch.nn.functional.silu(gate) * up)[..., None]).squeeze(-1)
    assert got.dtype == x.dtype and calc_diff(got, (outputs * weights[..., None]).sum(1)) < 1e-4
