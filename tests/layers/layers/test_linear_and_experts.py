"""Linear layers, their gradients, a router and experts agree with formulas in float64 or with simpler layers."""

import pytest
import torch
from torch import nn

import dsa
from dsa.testing import calc_diff
from dsa_layers import SequenceBatch
from dsa_layers.engine.joint_linear import grouped_products
from dsa_layers.layers.experts import Experts
from dsa_layers.layers.linear import BlockFP8Linear, GroupedLinear, LanguageModelHead, make_linear
from dsa_layers.layers.moe import GroupedSigmoidRouter, SwiGLU


def test_fp8_linear_quantises_weights_by_block_and_activations_by_token():
    layer = BlockFP8Linear(256, 200)
    x = torch.randn(7, 256) * torch.logspace(-2, 2, 7)[:, None]
    assert layer.weight.dtype == torch.float8_e4m3fn and layer.weight_scale_inv.shape == (2, 2)
    scales = layer.weight_scale_inv.double()
    w = torch.stack([layer.weight[o].double() * scales[o // 128].repeat_interleave(128) for o in range(200)])
    groups = x.double().unflatten(1, (2, 128))
    scale = 2.0 ** torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448))
    xq = ((groups / scale).float().to(torch.float8_e4m3fn).double() * scale).flatten(1)
    torch.testing.assert_close(layer(x).double(), xq @ w.T, rtol=1e-5, atol=1e-4)
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(layer.float_weight(torch.float32).double(), w)
    assert calc_diff(layer(x), x.double() @ w.T) < 2e-3, "far from the exact product"


def test_a_dequantised_weight_is_kept_until_the_parameters_change():
    layer, other = BlockFP8Linear(128, 256), BlockFP8Linear(128, 256)
    first = layer.float_weight(torch.bfloat16)
    assert layer.float_weight(torch.bfloat16) is first
    with torch.inference_mode():
        layer.load_state_dict(other.state_dict())
        changed = layer.float_weight(torch.float32)
    assert torch.equal(changed, other.float_weight(torch.float32)) and not changed.is_inference()
    layer.weight_scale_inv.data = 2 * layer.weight_scale_inv.data
    assert torch.equal(layer.float_weight(torch.float32), 2 * changed)


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("fp8", [(True, True), (True, False), (False, True), (False, False)], ids=str)
def test_a_grouped_layer_multiplies_each_group_with_its_rows(fp8, tokens):
    grouped, then = GroupedLinear(3, 256, 128, fp8=fp8[0]), make_linear(384, 256, fp8=fp8[1])
    x = torch.randn(tokens, 3, 256)
    layer, parts = grouped.matrices, []
    for g in range(3):
        rows = slice(128 * g, 128 * (g + 1))
        if fp8[0]:
            weight = layer.weight[rows], layer.weight_scale_inv[g : g + 1]
            parts.append(dsa.fp8_gemm_nt(layer.cast(x[:, g].contiguous()), weight, x.dtype))
        else:
            parts.append(nn.functional.linear(x[:, g], layer.weight[rows]))
    torch.testing.assert_close(grouped(x), torch.stack(parts, 1), atol=1e-5, rtol=1e-5)
    expected = then(torch.cat(parts, -1))
    assert expected.shape == (tokens, 256)
    batch = SequenceBatch.without_cache([tokens] if tokens else [])
    torch.testing.assert_close(grouped_products(x, grouped, then, batch), expected, atol=1e-5, rtol=1e-5)


def test_the_bias_of_a_router_chooses_and_does_not_weigh():
    router, x = GroupedSigmoidRouter(16, 24, 4, n_group=6, topk_group=2, scale=2.5), torch.randn(50, 16) * 2
    router.e_score_correction_bias.data = torch.randn(24) * 0.3
    experts, weights = router(x)
    scores = torch.sigmoid(x.double() @ router.weight.double().T).gather(1, experts)
    torch.testing.assert_close(weights.double(), 2.5 * scores / scores.sum(1, keepdim=True), rtol=1e-5, atol=1e-6)
    router.e_score_correction_bias.data.zero_()
    assert not torch.equal(router(x)[0], experts)


def test_each_fp8_expert_computes_its_swiglu():
    experts = Experts(5, 128, 256, limit=1.0, fp8=True)
    topk_indices, weights = torch.rand(12, 5).argsort(-1)[:, :2], torch.rand(12, 2)
    topk_indices[topk_indices == 3] = 4  # expert 3 gets no tokens; a token may have expert 4 twice
    x = torch.randn(12, 128)
    for e in range(5):
        single = SwiGLU(128, 256, limit=1.0, fp8=True)
        weights_of = (*experts.gate_up_proj[e].chunk(2), experts.down_proj[e])
        scales = (*experts.gate_up_proj_scale_inv[e].chunk(2), experts.down_proj_scale_inv[e])
        for layer, weight, scale in zip((single.gate_proj, single.up_proj, single.down_proj), weights_of, scales):
            layer.weight.data, layer.weight_scale_inv.data = weight, scale
        only = experts(x, torch.full((12, 1), e), torch.ones(12, 1))
        torch.testing.assert_close(only, single(x), rtol=1e-6, atol=1e-6)
    alone = torch.cat([experts(x[i : i + 1], topk_indices[i : i + 1], weights[i : i + 1]) for i in range(12)])
    torch.testing.assert_close(experts(x, topk_indices, weights), alone, rtol=1e-5, atol=1e-6)


def head_and_states(dtype):
    torch.manual_seed(0)
    head = LanguageModelHead(256, 300, dtype=dtype)
    return head, torch.randn(70, 256).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_are_not_rounded(dtype):
    head, x = head_and_states(dtype)
    y = head(x)
    expected = x.double() @ head.weight.double().T
    assert y.dtype == torch.float32 and (y - expected).abs().max() < 1e-5
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(head(x), y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("learned", [(True, True), (True, False), (False, True)])
def test_gradients_are_those_of_fp64_up_to_rounding(learned, dtype):
    (head, x), target = head_and_states(dtype), torch.randint(300, (70,))
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, head.weight)]
    torch.nn.functional.cross_entropy(exact[0] @ exact[1].T, target).backward()
    for tensor, learns in zip((x, head.weight), learned):
        tensor.requires_grad_(learns)
    torch.nn.functional.cross_entropy(head(x), target).backward()
    for tensor, learns, of_exact in zip((x, head.weight), learned, exact):
        assert (tensor.grad is not None) == learns
        if learns:
            assert tensor.grad.dtype == dtype
            error = (tensor.grad - of_exact.grad).norm() / of_exact.grad.norm()
            assert error < max(torch.finfo(dtype).eps, 1e-6)


def test_no_copy_is_kept_for_the_backward_pass():
    head, x = head_and_states(torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        head(x)
    assert {tensor.data_ptr() for tensor in kept} == {x.data_ptr(), head.weight.data_ptr()}
