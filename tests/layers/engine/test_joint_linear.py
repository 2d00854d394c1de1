"""Layers of one input as one product: the same bits, and the layers keep what is theirs."""

import copy
import functools

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.engine.paged_attention import PagedAttention
from dsa_layers.evaluation.selections import latest_keys
from dsa_layers.layers import joint_linear
from dsa_layers.layers.compressor import Compressor
from dsa_layers.layers.indexer import LightningIndexer
from dsa_layers.engine.joint_linear import join, multiply
from dsa_layers.layers.linear import BlockFP8Linear, FP32Linear, Linear
from dsa_layers.layers.rope import RotaryEmbedding, rope_frequencies
from tests.layers.layers.calls import record


class Several(nn.Module):
    """Layers that `join` makes one product of, in FP8 or in fp32."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def joint_layers(self):
        return (*self.layers,) if isinstance(self.layers[0], BlockFP8Linear) else ()

    def joint_fp32_layers(self):
        return (*self.layers,) if isinstance(self.layers[0], FP32Linear) else ()


def fp8_layers(*rows):
    return Several(BlockFP8Linear(256, n) for n in rows)


def fp32_layers(*scales):
    return Several(FP32Linear(256, 24, scale=scale, dtype=torch.bfloat16) for scale in scales)


@pytest.fixture
def products(monkeypatch):
    """Columns of every FP8 product, and the number of casts."""
    columns = record(monkeypatch, "fp8_gemm_nt", seen=lambda a, b, *_: len(b[0]))
    return columns, record(monkeypatch, "per_token_cast_to_fp8")


def check(layers, x, products, joined):
    """The result is that of the layers by themselves, and from how many products it is."""
    expected = [layer(x) for layer in layers]
    for found in products:
        found.clear()
    got = multiply(x, *layers)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, expected, strict=True))
    columns, casts = products
    rows = [len(layer.weight) for layer in layers]
    assert columns == ([sum(rows)] if joined else rows) and len(casts) == 1


def same(state, other):
    return state.keys() == other.keys() and all(torch.equal(state[k].float(), other[k].float()) for k in state)


X = torch.randn(5, 256).bfloat16()


def test_one_product_has_the_layers_bits(products):
    model = fp8_layers(256, 128, 72)
    before, parameters = copy.deepcopy(model.state_dict()), [*model.parameters()]
    with torch.inference_mode():
        check(model.layers, X, products, joined=False)
    join(model)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            for x in (X, X[:0], torch.randn(2, 3, 256)):
                check(model.layers, x, products, joined=True)
            check(model.layers[1:], X, products, joined=True)
            check([model.layers[0], model.layers[2]], X, products, joined=False)  # not neighbours
    assert same(model.state_dict(), before)
    assert all(a is b and not a.requires_grad for a, b in zip(model.parameters(), parameters, strict=True))
    assert len({layer.weight.untyped_storage().data_ptr() for layer in model.layers}) == 1
    places = [parameter.data_ptr() for parameter in parameters]
    join(model)  # again: nothing moves, as graphs may have the addresses
    assert [parameter.data_ptr() for parameter in parameters] == places


def test_weights_that_change_are_multiplied_as_they_are(products):
    model = fp8_layers(128, 128)
    join(model)
    first, second = model.layers
    with torch.no_grad():
        first.weight.copy_(second.weight)
        second.weight_scale_inv.mul_(2)
        check(model.layers, X, products, joined=True)
        model.load_state_dict(copy.deepcopy(fp8_layers(128, 128).state_dict()))
        check(model.layers, X, products, joined=True)
        second.weight.data = second.weight.flip(0)  # elsewhere
        check(model.layers, X, products, joined=False)
        join(model)
        check(model.layers, X, products, joined=True)
        second.weight.data = second.weight.data[:100]
        second.weight_scale_inv.data = second.weight_scale_inv.data[:1]
        check(model.layers, X, products, joined=True)
        model.layers[0] = BlockFP8Linear(256, 384)
        check(model.layers, X, products, joined=False)


def test_a_copy_and_a_file_have_the_layers_apart(products, tmp_path):
    model = fp8_layers(128, 200)
    join(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.layers[0].weight.zero_()
        check(other.layers, X, products, joined=False)
        check(model.layers, X, products, joined=True)
    assert model.layers[0].weight.float().abs().sum() > 0
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert same(load_file(tmp_path / "model.safetensors"), model.state_dict())


class Another(BlockFP8Linear):
    def forward(self, x):
        return super().forward(x) + 1


def test_what_is_not_joined_is_a_product_each_of_one_cast(products):
    """Blocks that would lie across two layers, and passes with gradients."""
    across, plain = fp8_layers(72, 128), fp8_layers(128, 128)
    join(across)
    join(plain)
    check(plain.layers, X, products, joined=False)
    with torch.no_grad():
        check(across.layers, X, products, joined=False)
        check(plain.layers, X, products, joined=True)


@torch.no_grad()
def test_layers_of_other_kinds_are_called(products):
    first, plain = BlockFP8Linear(256, 128), fp8_layers(128, 128)
    join(plain)
    called = []
    plain.layers[0].register_forward_hook(lambda *_: called.append(1))
    multiply(X, *plain.layers)
    assert called
    for other in (Linear(256, 64, dtype=torch.bfloat16), Another(256, 128), BlockFP8Linear(256, 128, use_ue8m0=False)):
        got = multiply(X, first, other)
        assert torch.equal(got[0], first(X)) and torch.equal(got[1], other(X))


@pytest.fixture
def fp32_products(monkeypatch):
    """Columns of every joint product in fp32."""
    return record(monkeypatch, "linear_fp32", seen=lambda x, weight, *_, **__: len(weight), owner=joint_linear)


def check_fp32(layers, fp32_products, columns):
    fp32_products.clear()
    expected = [X.float() @ layer.weight.float().T * getattr(layer, "scale", 1.0) for layer in layers]
    for a, b in zip(multiply(X, *layers), expected, strict=True):
        assert a.dtype == torch.float32 and a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)
    assert fp32_products == columns
    assert (joint_linear.multiply_as_one(X, *layers) is None) == (not columns)


def test_a_compressors_projections_are_one_product(fp32_products):
    """In fp32, of rows that are no whole blocks, too; apart with gradients, hooks, and weights of two dtypes."""
    model = Compressor(256, 24, 4, overlap=True, dtype=torch.bfloat16)
    before, parameters = copy.deepcopy(model.state_dict()), [*model.parameters()]
    layers = model.joint_layers()
    with torch.no_grad():
        check_fp32(layers, fp32_products, [])
        join(model)
        check_fp32(layers, fp32_products, [96])
    check_fp32(layers, fp32_products, [])
    assert same(model.state_dict(), before)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    with torch.no_grad():
        called = []
        handle = model.wgate.register_forward_hook(lambda *_: called.append(1))
        check_fp32(layers, fp32_products, [])
        assert called
        handle.remove()
        model.half()
        check_fp32(layers, fp32_products, [])  # moved apart
        model.wkv.bfloat16()
        join(model)
        check_fp32(layers, fp32_products, [])


@pytest.mark.parametrize(
    ("scales", "columns"), [((1.0, 1.0, 0.3), [72]), ((1.0, 0.3), [48]), ((0.3, 1.0), []), ((0.3, 0.3), [])]
)
@torch.no_grad()
def test_the_last_layer_alone_may_have_a_scale(scales, columns, fp32_products):
    model = fp32_layers(*scales)
    join(model)
    check_fp32(model.layers, fp32_products, columns)


def test_attention_with_another_way_of_selecting(products):
    """A selection that takes no keys gets none, and no weight moves."""
    indexer = LightningIndexer(256, 256, n_heads=64, top_k=8, quantize=True, fp8=True, dtype=torch.bfloat16)
    layer = PagedAttention(256, 2, indexer, q_lora_rank=256, fp8=True, dtype=torch.bfloat16)
    join(layer)
    batch, columns = SequenceBatch.without_cache([20]), products[0]
    x, angles = torch.randn(20, 256).bfloat16(), RotaryEmbedding(rope_frequencies(64, 1e4))(batch.positions)
    places = [parameter.data_ptr() for parameter in layer.parameters()]

    def joint_columns():
        columns.clear()
        with torch.no_grad():
            out = layer(x, *angles, batch)
        return columns[0], out

    with_keys, own = joint_columns()
    with latest_keys(layer):
        without_keys, latest = joint_columns()
    way = indexer.select
    indexer.select = functools.wraps(way)(lambda *given, **options: way(*given, **options))  # as what times it does
    again, repeated = joint_columns()
    assert (with_keys, without_keys, again) == (128 + 256 + 576, 256 + 576, 128 + 256 + 576)
    assert torch.equal(own, repeated) and not torch.equal(own, latest)
    assert [parameter.data_ptr() for parameter in layer.parameters()] == places
