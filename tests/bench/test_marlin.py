"""Marlin as the peer of FP4 experts: what is laid out for it, how it is called, and which passes are on it."""

import pytest
import torch

import dsa
from dsa.testing import calc_diff
from dsa_bench.e2e import peer_experts
from dsa_bench.e2e import peers as peer_ops
from dsa_bench.e2e.peer_experts import weight_of
from dsa_bench.peers import marlin
from dsa_layers.layers.experts import Experts
from tests.bench import marlin_stub


def fp4(count, rows, columns):
    weight = torch.randint(-128, 128, (count, rows, columns // 2), dtype=torch.int8)
    scale = torch.randint(110, 125, (count, rows, columns // 32), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return weight, scale


def inputs(tokens):
    """(x, each token's two experts of five, of which nobody chooses the last, their weights)"""
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(tokens)])
    return torch.randn(tokens, 256, dtype=torch.bfloat16) / 10, chosen, torch.rand(tokens, 2)


def widened(weight, scale):
    q, s = dsa.widen_fp4(weight, scale)
    return q.float() * s.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, : q.shape[1], : q.shape[2]]


@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (256, 128), (128, 320)])
def test_what_is_laid_out_is_the_same_weight(rows, columns):
    weight, scale = fp4(3, rows, columns)
    packed = marlin.pack(weight, scale)
    assert packed.weight.shape == (3, columns // 16, 2 * rows) and packed.scale.shape == (3, columns // 32, rows)
    assert torch.equal(marlin_stub.unpacked(*packed), widened(weight, scale))


def test_where_codes_and_scales_are():
    """By hand: the word of lane 5, which has row 1 and the channels 2, 3, 10 and 11, in the second warp's 16 rows."""
    weight, scale = torch.zeros(1, 64, 8, dtype=torch.int8), torch.zeros(1, 64, 1, dtype=torch.uint8)
    for nibble, (row, channel) in enumerate(
        [(17, 2), (17, 10), (25, 2), (25, 10), (17, 3), (17, 11), (25, 3), (25, 11)]
    ):
        weight[0, row, channel // 2] += (nibble + 1) << 4 * (channel % 2)
    scale[0, :, 0] = torch.arange(64)
    words = marlin.pack(weight.repeat(1, 1, 2), scale.view(torch.float8_e8m0fnu))[0]
    assert words[0, 0].nonzero().flatten().tolist() == [5 * 4 + 1]
    assert words[0, 0, 21].item() & 0xFFFFFFFF == 0x87654321
    order = marlin.pack(weight.repeat(1, 1, 2), scale.view(torch.float8_e8m0fnu)).scale.view(torch.uint8)
    assert order[0, 0, :9].tolist() == [0, 16, 8, 24, 32, 48, 40, 56, 1]


@pytest.mark.parametrize(("rows", "size"), [(1842, 8), (1844, 16), (10**6, 64)])
def test_rows_of_a_block(rows, size):
    assert marlin.block_size(rows, 256) == size


@pytest.mark.parametrize("tokens", [1, 8, 70])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_sums_of_experts(tokens, limit, peers):
    marlin.MARLIN.load()
    gate_up, down = fp4(5, 256, 256), fp4(5, 256, 128)
    x, experts, weights = inputs(tokens)
    got = marlin.experts_sum(x, experts, weights, marlin.pack(*gate_up), marlin.pack(*down), limit)
    matrices, expected = [widened(*pair) for pair in (gate_up, down)], torch.zeros(tokens, 256)
    for t, (own, factors) in enumerate(zip(experts.tolist(), weights.tolist())):
        for expert, factor in zip(own, factors):
            gate, up = (matrices[0][expert] @ x[t].float()).chunk(2)
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            expected[t] += factor * (matrices[1][expert] @ (torch.nn.functional.silu(gate) * up))
    assert got.dtype == x.dtype and calc_diff(got, expected) < 1e-4


@pytest.fixture
def experts():
    return Experts(5, 256, 128, fp8=True, fp4=True, limit=0.5)


def test_decoding_is_on_marlin_and_prompts_are_not(peers, experts, monkeypatch):
    """FP8 activations there and bf16 here make all the difference."""
    monkeypatch.setattr(peer_experts, "LEAST_WIDENED", 90)
    monkeypatch.setattr(peer_experts, "LEAST_TOKENS", 90)
    calls, products = [], marlin.experts_sum
    monkeypatch.setattr(marlin, "experts_sum", lambda x, *rest: calls.append(len(x)) or products(x, *rest))
    for tokens in (1, 89, 90):
        x, chosen, weights = inputs(tokens)
        shared, residual = torch.randn(2, tokens, 256, dtype=torch.bfloat16)
        for more in ((), (shared,), (shared, residual), (None, residual)):
            expected = experts(x, chosen, weights, *more)
            with peer_ops.peer_kernels():
                got = experts(x, chosen, weights, *more)
            assert calc_diff(got, expected) < 2e-3
    assert calls == 4 * [1] + 4 * [89]


def test_other_experts_are_not_on_marlin(peers, monkeypatch):
    monkeypatch.setattr(marlin, "experts_sum", None)
    x, chosen, weights = inputs(3)
    for options in ({"fp8": True}, {"dtype": torch.bfloat16}):
        with peer_ops.peer_kernels():
            Experts(5, 256, 128, **options)(x, chosen, weights)
    with peer_ops.peer_kernels():
        Experts(5, 256, 128, fp8=True, fp4=True)(x.float(), chosen, weights)


def test_weights_are_laid_out_once_and_widened_ones_given_up(peers, experts, monkeypatch):
    packed, pack = [], marlin.pack
    monkeypatch.setattr(marlin, "pack", lambda *pair: packed.append(1) or pack(*pair))
    wide = weight_of(experts, "down_proj")
    for _ in range(2):
        with peer_ops.peer_kernels():
            experts(*inputs(3))
    assert len(packed) == 2 and weight_of(experts, "down_proj") is not wide
    assert torch.equal(weight_of(experts, "down_proj")[0].float(), wide[0].float())


@pytest.mark.parametrize("file", ["_C_stable_libtorch.abi3.so", "_moe_C_stable_libtorch.abi3.so"])
def test_without_marlin_decoding_stays_ours(file, peers, installed, experts):
    (installed / "vllm" / file).unlink()
    arguments = inputs(3)
    expected = experts(*arguments)
    with peer_ops.peer_kernels() as replaced:
        assert torch.equal(experts(*arguments), expected) and "FP4 experts" not in replaced.ops
