"""Linear layers and the mixture of experts against formulas written out in the tests."""

import pytest
import torch
from torch import nn

import dsa
from dsa.kernels.gemm import linear_fp32_limits
from dsa.testing import calc_diff
from dsa_layers.batch.packing import GroupRows
from dsa_layers.layers import linear
from dsa_layers.layers.experts import Experts
from dsa_layers.layers.grouped_linear import GroupedLinear
from dsa_layers.layers.linear import BlockFP8Linear, FP32Linear, linear_fp32, make_linear
from dsa_layers.layers.moe import GroupedSigmoidRouter, MoE, SwiGLU
from tests.layers.layers.calls import record


def test_fp8_linear_quantises_weights_by_block_and_activations_by_token():
    layer = BlockFP8Linear(256, 200)
    x = torch.randn(7, 256) * torch.logspace(-2, 2, 7)[:, None]
    assert layer.weight.dtype == torch.float8_e4m3fn and layer.weight_scale_inv.shape == (2, 2)
    scales = layer.weight_scale_inv.double()
    w = torch.stack([layer.weight[o].double() * scales[o // 128].repeat_interleave(128) for o in range(200)])
    xq = torch.empty(7, 256, dtype=torch.double)
    for t in range(7):
        for g in range(2):
            part = x[t, g * 128 : (g + 1) * 128].double()
            scale = 2.0 ** torch.ceil(torch.log2(part.abs().max().clamp_min(1e-4) / 448))
            xq[t, g * 128 : (g + 1) * 128] = (part / scale).float().to(torch.float8_e4m3fn).double() * scale
    torch.testing.assert_close(layer(x).double(), xq @ w.T, rtol=1e-5, atol=1e-4)
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(layer.float_weight(torch.float32).double(), w)
    # And the quantised product is near the exact one.
    assert calc_diff(layer(x), x.double() @ w.T) < 2e-3


def test_fp32_products_stay_so_under_autocast():
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear_fp32(x, weight)
    assert torch.equal(y, linear_fp32(x, weight)) and y.dtype == torch.float32


@pytest.fixture
def few(monkeypatch):
    """The shapes of every x that `dsa.linear_fp32` gets."""
    return record(monkeypatch, "linear_fp32", seen=lambda x, *_, **__: tuple(x.shape))


@pytest.mark.parametrize(
    ("tokens", "rows", "dtype"),
    [(1, 40, torch.bfloat16), (64, 768, torch.float16), (16, 3072, torch.bfloat16)],
)
@torch.no_grad()
def test_few_fp32_products_are_the_ops(tokens, rows, dtype, few):
    x, weight = torch.randn(tokens, 64).to(dtype), torch.randn(rows, 64).to(dtype)
    expected = x.float() @ weight.float().T
    torch.testing.assert_close(linear_fp32(x, weight), expected, rtol=1e-5, atol=1e-4)
    expected[:, 8:] *= 0.3
    torch.testing.assert_close(linear_fp32(x, weight, 0.3, scaled_from=8), expected, rtol=1e-5, atol=1e-4)
    assert few == [(tokens, 64)] * 2
    assert linear.MOST_RESULTS < linear_fp32_limits.MAX_ROWS


def bf16(*shape):
    return torch.randn(shape).bfloat16()


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (bf16(65, 64), bf16(40, 64)),
        (bf16(17, 64), bf16(4096, 64)),
        (torch.randn(9, 64), torch.randn(40, 64)),
        (bf16(9, 64).half(), bf16(40, 64)),
        (bf16(9, 48), bf16(40, 48)),
        (bf16(64, 9).T, bf16(40, 64)),
        (bf16(3, 3, 64), bf16(40, 64)),
        (bf16(9, 64), bf16(40, 64).requires_grad_()),
    ],
    ids=["tokens", "results", "fp32", "two dtypes", "channels", "columns", "3-D", "gradients"],
)
def test_other_fp32_products_are_pytorchs(x, weight, few):
    with torch.set_grad_enabled(weight.requires_grad):
        y = linear_fp32(x, weight, 0.3, scaled_from=8)
    expected = x.float() @ weight.float().T
    expected[..., 8:] *= 0.3
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)
    assert not few


@torch.no_grad()
def test_fp32_products_of_a_gpu_without_the_kernel_are_pytorchs(few, monkeypatch):
    asked, products = [], []
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(dsa.runtime.backends, "runs_kernel", lambda op, x: asked.append(op))
    monkeypatch.setattr(torch, "mm", lambda x, w, out_dtype: products.append(out_dtype) or x.float() @ w.float())
    x, weight = bf16(9, 64), bf16(40, 64)
    torch.testing.assert_close(linear_fp32(x, weight, 0.5), x.float() @ weight.float().T * 0.5)
    assert asked == ["linear_fp32"] and products == [torch.float32] and not few


def test_a_layer_with_a_scale_has_its_gradients():
    layer, x = FP32Linear(64, 5, scale=0.3, dtype=torch.bfloat16), bf16(9, 64)
    y = layer(x)
    torch.testing.assert_close(y, x.float() @ layer.weight.float().T * 0.3, rtol=1e-5, atol=1e-5)
    y.sum().backward()
    torch.testing.assert_close(layer.weight.grad.float(), 0.3 * x.float().sum(0).expand(5, -1), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BlockFP8Linear(100, 8), "in_features: must be a multiple of 128, got 100"),
        (lambda: GroupedSigmoidRouter(16, 10, 2, n_group=4), "n_group: must divide n_experts=10, got 4"),
        (
            lambda: Experts(2, 128, 128, fp4=True),
            "fp4: FP4 weights are multiplied with FP8 activations; accepted with fp8=True",
        ),
        (
            lambda: Experts(2, 128, 64, fp8=True),
            "hidden, inner: must be multiples of 128 for FP8 weights, got 128 and 64",
        ),
    ],
)
def test_layers_that_are_not_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_bias_of_a_router_chooses_and_does_not_weigh():
    router, x = GroupedSigmoidRouter(16, 24, 4, n_group=6, topk_group=2, scale=2.5), torch.randn(50, 16) * 2
    router.e_score_correction_bias.data = torch.randn(24) * 0.3
    experts, weights = router(x)
    scores = torch.sigmoid(x.double() @ router.weight.double().T).gather(1, experts)
    torch.testing.assert_close(weights.double(), 2.5 * scores / scores.sum(1, keepdim=True), rtol=1e-5, atol=1e-6)
    router.e_score_correction_bias.data.zero_()
    assert not torch.equal(router(x)[0], experts)


def plain_mixture(x, experts, weights, gate_up, down):
    """Token by token, each with its experts."""
    out = []
    for token, chosen, of_token in zip(x, experts.tolist(), weights):
        y = 0
        for expert, weight in zip(chosen, of_token):
            gate, up = (gate_up[expert] @ token).chunk(2)
            y = y + weight * (down[expert] @ (nn.functional.silu(gate) * up))
        out.append(y)
    return torch.stack(out)


@pytest.mark.parametrize("n_shared", [0, 2])
def test_moe_is_the_weighted_sum_of_its_experts(n_shared):
    """And so are its gradients."""
    moe = MoE(16, 8, GroupedSigmoidRouter(16, 6, 2, scale=1.5), n_shared=n_shared)
    x = torch.randn(9, 16, requires_grad=True)
    parameters = x, moe.experts.gate_up_proj, moe.experts.down_proj
    exact = [parameter.detach().double().requires_grad_() for parameter in parameters]
    experts, weights = moe.gate(x.detach())
    expected = plain_mixture(exact[0], experts, weights.detach().double(), *exact[1:])
    if n_shared:
        shared = moe.shared_experts
        assert shared.up_proj.weight.shape == (16, 16)
        gate, up, down = (p.weight.detach().double() for p in (shared.gate_proj, shared.up_proj, shared.down_proj))
        expected = expected + (nn.functional.silu(exact[0] @ gate.T) * (exact[0] @ up.T)) @ down.T
    got = moe(x)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)
    got.square().sum().backward()
    expected.square().sum().backward()
    for parameter, of_exact in zip(parameters[1:], exact[1:]):
        torch.testing.assert_close(parameter.grad.double(), of_exact.grad, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):  # the routed experts stay in fp32, the shared one does not
        rounded = moe(x)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, got, rtol=0.02, atol=0.02)


def test_gradients_of_experts_reach_tokens_and_weights():
    experts, topk_indices = Experts(3, 8, 4), torch.tensor([[0, 2], [2, 1], [0, 1]])
    given = torch.randn(3, 8, requires_grad=True), torch.rand(3, 2, requires_grad=True)
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    experts(given[0], topk_indices, given[1]).square().sum().backward()
    matrices = experts.gate_up_proj.detach().double(), experts.down_proj.detach().double()
    plain_mixture(exact[0], topk_indices, exact[1], *matrices).square().sum().backward()
    for ours, theirs in zip(given, exact):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)


def test_fp8_experts_are_swiglus():
    """Each as the shared experts' layer computes it, whatever other tokens there are."""
    experts = Experts(5, 128, 256, limit=1.0, fp8=True)
    topk_indices, weights = torch.rand(12, 5).argsort(-1)[:, :2], torch.rand(12, 2)
    topk_indices[topk_indices == 3] = 4  # an expert without tokens, and a token that goes to one twice
    x = torch.randn(12, 128)
    got = experts(x, topk_indices, weights)
    for e in range(5):
        single = SwiGLU(128, 256, limit=1.0, fp8=True)
        weights_of = (*experts.gate_up_proj[e].chunk(2), experts.down_proj[e])
        scales = (*experts.gate_up_proj_scale_inv[e].chunk(2), experts.down_proj_scale_inv[e])
        for layer, weight, scale in zip((single.gate_proj, single.up_proj, single.down_proj), weights_of, scales):
            layer.weight.data, layer.weight_scale_inv.data = weight, scale
        only = experts(x, torch.full((12, 1), e), torch.ones(12, 1))
        torch.testing.assert_close(only, single(x), rtol=1e-6, atol=1e-6)
    alone = torch.cat([experts(x[i : i + 1], topk_indices[i : i + 1], weights[i : i + 1]) for i in range(12)])
    torch.testing.assert_close(got, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fp4", [False, True])
@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_the_rows_of_one_token_are_its_cast(fp4, use_ue8m0, monkeypatch):
    """With one token, routed experts reuse the caller's cast. The output has the bits that casting the expert rows
    gives, also where this rank has only some of the experts."""
    torch.manual_seed(3)
    moe = MoE(128, 256, GroupedSigmoidRouter(128, 6, 3), fp8=True, fp4_experts=fp4, use_ue8m0=use_ue8m0)
    x = torch.randn(1, 128)
    cast = moe.shared_experts.gate_proj.cast(x)
    with torch.no_grad():
        expected = moe(x)
        monkeypatch.setattr(dsa, "scatter_cast_to_fp8", None)
        assert torch.equal(moe(x, cast=cast), expected)
        first = int(moe.gate(x)[0].max()) - 1  # a part with two of the token's three experts at most
        moe.experts.count, moe.experts.first = 2, first
        for name, parameter in [*moe.experts.named_parameters()]:
            setattr(moe.experts, name, nn.Parameter(parameter[first : first + 2], requires_grad=False))
        part = moe(x, cast=cast)
        monkeypatch.undo()
        assert torch.equal(part, moe(x)) and not torch.equal(part, expected)


@pytest.mark.parametrize("fp4", [False, True])
@pytest.mark.parametrize("cast", [False, True])
def test_a_part_of_the_experts_expects_its_share_of_the_rows(cast, fp4, monkeypatch):
    """Where tokens' rows are stored by expert, and where they are gathered; a whole has nothing to say."""
    names = ["grouped_fp8_gemm_swiglu", "grouped_fp8_gemm_nt"]
    if fp4:
        names = ["grouped_fp8_fp4_gemm_swiglu", "grouped_fp8_fp4_gemm_nt"]
    found = record(monkeypatch, *names, seen=lambda *_, expected_rows, **__: expected_rows)
    whole = Experts(6, 128, 256, limit=1.0, fp8=True, fp4=fp4)
    part = Experts(2, 128, 256, limit=1.0, fp8=True, fp4=fp4)
    part.total, part.first = 6, 2
    suffixes = ("", "_scale_inv", "_block_scale") if fp4 else ("", "_scale_inv")
    for name in (kind + suffix for kind in ("gate_up_proj", "down_proj") for suffix in suffixes):
        setattr(part, name, nn.Parameter(getattr(whole, name)[2:4].clone(), requires_grad=False))
    x, weights = torch.randn(7, 128), torch.rand(7, 2)
    topk_indices = torch.rand(7, 6).argsort(-1)[:, :2]
    options = {"cast": dsa.per_token_cast_to_fp8(x, True)} if cast else {}
    own = (topk_indices >= 2) & (topk_indices < 4)
    expected = whole(x, topk_indices, weights * own, **options)
    assert found == [None, None]
    assert torch.equal(part(x, topk_indices, weights, **options), expected)
    assert found[2:] == [5, 5]  # of 14 rows


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


class Tokens:
    """All that a grouped layer asks of a batch."""

    def group_rows(self, groups, tokens):
        return GroupRows.of(tokens, groups, torch.device("cpu"))


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("fp8", [(True, True), (True, False), (False, True), (False, False)], ids=str)
def test_a_grouped_layer_and_the_one_behind_it(fp8, tokens):
    """Group by group, each with its own rows of the weights, and nothing in another token's place."""
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
    got, expected = grouped(x, then, Tokens()), then(torch.cat(parts, -1))
    assert got.shape == (tokens, 256)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
