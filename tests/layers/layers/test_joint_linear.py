"""Layers of one input as one product: the same bits, and the layers keep what is theirs."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file

import dsa
from dsa_layers.layers import joint_linear
from dsa_layers.layers.joint_linear import JointLinear
from dsa_layers.layers.linear import BlockFP8Linear, Linear


@pytest.fixture
def products(monkeypatch):
    """Columns of every FP8 product, and the number of casts."""
    columns, casts = [], []
    product, cast = dsa.fp8_gemm_nt, dsa.per_token_cast_to_fp8
    monkeypatch.setattr(dsa, "fp8_gemm_nt", lambda a, b, *rest: columns.append(len(b[0])) or product(a, b, *rest))
    monkeypatch.setattr(dsa, "per_token_cast_to_fp8", lambda *given: casts.append(1) or cast(*given))
    return columns, casts


def layers(*rows, **options):
    return [BlockFP8Linear(256, n, **options) for n in rows]


def check(joint, own, x, products, joined):
    """The result is that of the layers by themselves, and from how many products it is."""
    expected = [layer(x) for layer in own]
    for found in products:
        found.clear()
    got = joint(x, *own)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, expected, strict=True))
    columns, casts = products
    rows = [len(layer.weight) for layer in own]
    assert columns == ([sum(rows)] if joined else rows) and len(casts) == 1


def test_one_product_has_the_layers_bits(products):
    own, x = layers(256, 128, 72), torch.randn(5, 256).bfloat16()
    names, before = [list(layer.state_dict()) for layer in own], [copy.deepcopy(layer.state_dict()) for layer in own]
    joint = JointLinear()
    with torch.inference_mode():
        for given in (x, x[:0], torch.randn(2, 3, 256)):
            check(joint, own, given, products, joined=True)
    # The layers have their parameters, which are no copies.
    assert [list(layer.state_dict()) for layer in own] == names
    assert all(torch.equal(a[name].float(), b.state_dict()[name].float()) for a, b in zip(before, own) for name in a)
    assert len({layer.weight.untyped_storage().data_ptr() for layer in own}) == 1


def test_weights_that_change_are_multiplied_as_they_are(products):
    own, x, joint = layers(128, 128), torch.randn(3, 256).bfloat16(), JointLinear()
    with torch.no_grad():
        check(joint, own, x, products, joined=True)
        own[0].weight.copy_(own[1].weight)
        own[1].weight_scale_inv.mul_(2)
        check(joint, own, x, products, joined=True)
        own[1].weight.data = own[1].weight.flip(0)
        check(joint, own, x, products, joined=True)
        own[0] = BlockFP8Linear(256, 384)
        check(joint, own, x, products, joined=True)


def test_a_copy_and_a_file_have_the_layers_apart(products, tmp_path):
    own, x, joint = torch.nn.ModuleList(layers(128, 200)), torch.randn(3, 256).bfloat16(), JointLinear()
    with torch.no_grad():
        check(joint, [*own], x, products, joined=True)
        other, its = copy.deepcopy((own, joint))
        check(its, [*other], x, products, joined=True)
        other[0].weight.zero_()
        check(joint, [*own], x, products, joined=True)
    assert own[0].weight.float().abs().sum() > 0
    save_file(own.state_dict(), tmp_path / "model.safetensors")
    assert all(
        torch.equal(value.float(), own.state_dict()[name].float())
        for name, value in load_file(tmp_path / "model.safetensors").items()
    )


def test_weights_stay_where_a_graph_was_captured_with_them(products, monkeypatch):
    own, x, joint = layers(128, 128), torch.randn(3, 256).bfloat16(), JointLinear()
    places = [layer.weight.data_ptr() for layer in own]
    for capturing in (True, False):
        monkeypatch.setattr(joint_linear, "_capturing", lambda tensor, now=capturing: now)
        with torch.no_grad():
            check(joint, own, x, products, joined=False)
    assert [layer.weight.data_ptr() for layer in own] == places
    # Once they are joined, graphs have the one tensor's addresses.
    joint, capturing = JointLinear(), [False]
    monkeypatch.setattr(joint_linear, "_capturing", lambda tensor: capturing[0])
    with torch.no_grad():
        check(joint, own, x, products, joined=True)
        capturing[0] = True
        check(joint, own, x, products, joined=True)


def test_what_is_not_joined(products):
    """Blocks that would lie across two layers, and passes with gradients: a cast for all, and a product each."""
    x = torch.randn(3, 256).bfloat16()
    with torch.no_grad():
        check(JointLinear(), layers(72, 128), x, products, joined=False)
    check(JointLinear(), layers(128, 128), x, products, joined=False)
    with torch.inference_mode():  # its tensors' changes are not counted
        check(JointLinear(), layers(128, 128), x, products, joined=False)
    with torch.no_grad():
        mixed = [*layers(128), Linear(256, 64, dtype=torch.bfloat16), *layers(128, use_ue8m0=False)]
        got = JointLinear()(x, *mixed)
        assert all(torch.equal(a, layer(x)) for a, layer in zip(got, mixed, strict=True))
