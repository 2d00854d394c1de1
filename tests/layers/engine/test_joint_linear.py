"""Tests of joint products (`join`, `multiply`): layers that read the same input share one product."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dsa_layers.engine import joint_linear
from dsa_layers.engine.fp32_product import fp32_product
from dsa_layers.engine.fuse import fuse
from dsa_layers.engine.joint_linear import join, multiply, pad_scales
from dsa_layers.layers.linear import BlockFP8Linear, FP32Linear, Linear
from tests.layers.io.stand_ins import assert_same_tensors
from tests.layers.layers import small_layers
from tests.layers.layers.calls import record

X = torch.randn(5, 256).bfloat16()


class Several(nn.Module):
    """FP8 layers that read the same input. rows: the number of output channels of each layer."""

    def __init__(self, *rows):
        super().__init__()
        self.layers = nn.ModuleList(BlockFP8Linear(256, n) for n in rows)

    def joint_layers(self):
        return (*self.layers,)


@pytest.fixture
def products(monkeypatch):
    """Return two lists that grow: the number of columns of each FP8 product, and an item per FP8 cast."""
    columns = record(monkeypatch, "fp8_gemm_nt", seen=lambda a, b, *_: len(b[0]))
    return columns, record(monkeypatch, "per_token_cast_to_fp8")


def check(layers, x, products, joined):
    """Check that `multiply` has the bits of separate products. It must make one cast and, if `joined`, one product."""
    expected = [layer(x) for layer in layers]
    for found in products:
        found.clear()
    got = multiply(x, *layers)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, expected, strict=True))
    columns, casts = products
    rows = [len(layer.weight) for layer in layers]
    assert columns == ([sum(rows)] if joined else rows) and len(casts) == 1


def test_one_product_has_the_bits_of_the_layers(products):
    model = Several(256, 128, 72)
    before, parameters = copy.deepcopy(model.state_dict()), [*model.parameters()]
    check(model.layers, X, products, joined=False)
    join(model)
    for x in (X, X[:0], torch.randn(2, 3, 256)):
        check(model.layers, x, products, joined=True)
    check(model.layers[1:], X, products, joined=True)
    check([model.layers[0], model.layers[2]], X, products, joined=False)  # layer 1 lies between them
    assert_same_tensors(model.state_dict(), before)
    assert all(a is b and not a.requires_grad for a, b in zip(model.parameters(), parameters, strict=True))
    places = [parameter.data_ptr() for parameter in parameters]
    join(model)  # must not move the weights, because CUDA graphs may hold their addresses
    assert [parameter.data_ptr() for parameter in parameters] == places


@torch.no_grad()
def test_changed_weights_are_multiplied_as_they_are(products):
    model = Several(128, 128)
    join(model)
    first, second = model.layers
    first.weight.copy_(second.weight)
    second.weight_scale_inv.mul_(2)
    check(model.layers, X, products, joined=True)
    second.weight.data = second.weight.flip(0)  # no longer adjacent to the first weight
    check(model.layers, X, products, joined=False)
    model.layers[0] = BlockFP8Linear(256, 384)
    join(model)
    check(model.layers, X, products, joined=True)


@torch.no_grad()
def test_a_copy_and_a_file_have_the_layers_apart(products, tmp_path):
    model = Several(128, 200)
    join(model)
    other = copy.deepcopy(model)
    other.layers[0].weight.zero_()
    check(other.layers, X, products, joined=False)
    check(model.layers, X, products, joined=True)
    assert model.layers[0].weight.float().abs().sum() > 0
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert_same_tensors(load_file(tmp_path / "model.safetensors"), model.state_dict())


@torch.no_grad()
def test_scales_are_padded_for_products_and_saved_without(products, tmp_path, monkeypatch):
    """Layers of 256 channels have two scales a row. A product reads rows of four."""
    model, alone = Several(128, 200), BlockFP8Linear(256, 72)
    before = copy.deepcopy(model.state_dict())
    join(model)
    seen = record(monkeypatch, "fp8_gemm_nt", seen=lambda a, b, *_: b[1].shape)
    multiply(X, *model.layers)
    pad_scales(alone)
    alone(X)
    assert seen == [(3, 4), (1, 4)]
    place = alone.weight_scale_inv.data_ptr()
    pad_scales(alone)
    assert alone.weight_scale_inv.data_ptr() == place
    assert_same_tensors(model.state_dict(), before)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert_same_tensors(load_file(tmp_path / "model.safetensors"), before)
    expected = alone(X)
    alone.weight_scale_inv.mul_(2)
    assert torch.equal(alone(X), 2 * expected)


class Another(BlockFP8Linear):
    def forward(self, x):
        return super().forward(x) + 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (BlockFP8Linear(256, 72), BlockFP8Linear(256, 128)),
        (BlockFP8Linear(256, 128), Linear(256, 64, dtype=torch.bfloat16)),
        (BlockFP8Linear(256, 128), Another(256, 128)),
        (BlockFP8Linear(256, 128), BlockFP8Linear(256, 128, use_ue8m0=False)),
    ],
    ids=["blocks across two layers", "float", "subclass", "another scaling"],
)
@torch.no_grad()
def test_other_layers_are_multiplied_one_by_one(first, second):
    joint_linear.join_layers((first, second))
    assert joint_linear.multiply_as_one(X, first, second) is None
    assert all(torch.equal(a, layer(X)) for a, layer in zip(multiply(X, first, second), (first, second), strict=True))


@pytest.fixture
def fp32_products(monkeypatch):
    """Return the growing list of the number of columns of each fp32 product."""
    return record(monkeypatch, "fp32_product", seen=lambda x, weight, *_, **__: len(weight), owner=joint_linear)


@pytest.mark.parametrize(
    ("scales", "joined"), [((1.0, 1.0, 0.3), True), ((1.0, 0.3), True), ((0.3, 1.0), False), ((0.3, 0.3), False)]
)
@torch.no_grad()
def test_only_the_last_fp32_layer_may_have_a_scale(scales, joined, fp32_products):
    layers = [FP32Linear(256, 24, scale=scale, dtype=torch.bfloat16) for scale in scales]
    joint_linear.join_layers(layers)
    for a, layer in zip(multiply(X, *layers), layers, strict=True):
        torch.testing.assert_close(a, layer(X), rtol=1e-5, atol=1e-4)
    assert fp32_products == ([24 * len(scales)] if joined else [])


def test_the_projections_of_a_compressor_are_one_product(fp32_products):
    """Each of the two weights has 48 rows. Only joined FP8 weights need multiples of 128 (`_blocks_fit`)."""
    model = fuse(small_layers.compressor(24, dtype=torch.bfloat16))
    layers = model.joint_layers()
    expected = [layer(X) for layer in layers]
    for columns in ([96], [48, 48]):
        fp32_products.clear()
        torch.testing.assert_close(multiply(X, *layers), tuple(expected), rtol=1e-5, atol=1e-4)
        assert fp32_products == columns
        model.half().bfloat16()  # moves the weights apart
    model.wkv.half()
    join(model)
    assert joint_linear.multiply_as_one(X, *layers) is None, "weights of two dtypes"


def bf16(*shape):
    return torch.randn(shape).bfloat16()


PRODUCTS = {
    "one token": (bf16(1, 64), bf16(40, 64), True),
    "most results": (bf16(16, 64), bf16(3072, 64), True),
    "more tokens": (bf16(65, 64), bf16(40, 64), False),
    "more results": (bf16(17, 64), bf16(4096, 64), False),
    "fp32": (torch.randn(9, 64), torch.randn(40, 64), False),
    "channels": (bf16(9, 48), bf16(40, 48), False),
    "3-D": (bf16(3, 3, 64), bf16(40, 64), False),
}


@pytest.mark.parametrize(("x", "weight", "by_the_op"), PRODUCTS.values(), ids=PRODUCTS)
def test_few_fp32_results_come_from_the_op_and_others_from_pytorch(x, weight, by_the_op, monkeypatch):
    called = record(monkeypatch, "linear_fp32")
    with torch.autocast("cpu", torch.bfloat16):
        got = fp32_product(x, weight, 0.3, scaled_from=8)
    expected = x.float() @ weight.float().T
    expected[..., 8:] *= 0.3
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)
    assert called == ["linear_fp32"] * by_the_op
