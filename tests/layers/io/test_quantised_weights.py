"""Scales of other dtypes, and packed FP4."""

import pytest
import torch
from safetensors.torch import save_file

from dsa import fp4_block_scales, widen_fp4
from dsa.reference import dequantize_fp4
from dsa_layers.io.directory import SINGLE_NAME
from dsa_layers.io.weights import load_weights
from tests.layers.io.stand_ins import BF16, E8M0, F32, FP8, failure, powers, stand_in, write


@pytest.fixture
def fp4():
    """A packed [200, 64] weight (values [200, 128]) and its scales."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(-128, 128, (200, 64), dtype=torch.int8, generator=generator)
    return {"w.weight": packed, "w.weight_scale_inv": powers(torch.randint(-9, 6, (200, 4), generator=generator))}


@pytest.mark.parametrize("dtype", [E8M0, torch.float32])
def test_fp8_scales_of_either_dtype(tmp_path, dtype):
    exponents = torch.arange(10).view(5, 2) - 127
    q = torch.full((576, 200), 2.0).to(FP8)
    save_file({"w.weight": q, "w.weight_scale_inv": powers(exponents).to(dtype)}, tmp_path / SINGLE_NAME)
    expected = torch.ldexp(torch.ones(5, 2), exponents)
    model = stand_in({"w.weight": ((576, 200), FP8), "w.weight_scale_inv": ((5, 2), F32)})
    load_weights(model, tmp_path, progress=False)
    assert model.w.weight_scale_inv.dtype == F32 and torch.equal(model.w.weight_scale_inv, expected)
    model = stand_in({"w.weight": ((576, 200), F32)})
    load_weights(model, tmp_path, progress=False)
    assert torch.equal(model.w.weight[::128, ::128], 2 * expected)


@pytest.mark.parametrize("name", ["w.weight", "weights"])
def test_fp4_is_widened_to_fp8(tmp_path, fp4, name):
    """Whatever lies first in the file, the weight or its scale."""
    stored = {name: fp4["w.weight"], f"{name}_scale_inv": fp4["w.weight_scale_inv"]}
    save_file(stored, tmp_path / SINGLE_NAME)
    model = stand_in({name: ((200, 128), FP8), f"{name}_scale_inv": ((2, 1), F32)})
    load_weights(model, tmp_path, progress=False)
    q, scale = widen_fp4(*fp4.values())
    state = model.state_dict()
    assert torch.equal(state[name].view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(state[f"{name}_scale_inv"], scale)


def keeps_fp4(name="w.weight"):
    """A model that keeps the weight of `fp4`."""
    scales = {f"{name}_scale_inv": ((200, 4), E8M0), f"{name}_block_scale": ((2, 1), F32)}
    return stand_in({name: ((200, 64), torch.int8)} | scales)


@pytest.mark.parametrize("name", ["weights", "w.weight"])
def test_fp4_is_kept(tmp_path, fp4, name):
    """With the scales of its blocks, which nothing stores; what the file has of that name is not read."""
    stored = {name: fp4["w.weight"], f"{name}_scale_inv": fp4["w.weight_scale_inv"]}
    for more in ({}, {f"{name}_block_scale": torch.ones(3)}):
        save_file(stored | more, tmp_path / SINGLE_NAME)
        model = keeps_fp4(name)
        load_weights(model, tmp_path, progress=False)
        state = model.state_dict()
        assert torch.equal(state[name], fp4["w.weight"])
        assert torch.equal(state[f"{name}_scale_inv"].view(torch.uint8), fp4["w.weight_scale_inv"].view(torch.uint8))
        assert torch.equal(state[f"{name}_block_scale"], fp4_block_scales(*fp4.values()))


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_fp4_is_dequantised(tmp_path, fp4, dtype):
    write(tmp_path, {"w.weight": fp4["w.weight"]}, {"w.weight_scale_inv": fp4["w.weight_scale_inv"]})
    model = stand_in({"w.weight": ((200, 128), dtype)})
    load_weights(model, tmp_path, progress=False)
    assert torch.equal(model.w.weight, dequantize_fp4(*fp4.values(), dtype))


def test_int8_is_not_fp4_where_the_model_wants_int8(tmp_path):
    save_file({"a": torch.ones(4, 4, dtype=torch.int8)}, tmp_path / SINGLE_NAME)
    model = stand_in({"a": ((4, 4), torch.int8)})
    load_weights(model, tmp_path, progress=False)
    assert model.a.eq(1).all()


def test_fp4_that_fp8_cannot_hold(tmp_path, fp4):
    """Found when it is read; the dequantised mode loads it."""
    fp4["w.weight"][130, :16], fp4["w.weight"][131, :16] = 0x11, 0x77
    scale = fp4["w.weight_scale_inv"].view(torch.uint8)
    scale[130, 0], scale[131, 0] = 100, 127 + 6
    save_file(fp4, tmp_path / SINGLE_NAME)
    model = stand_in({"w.weight": ((200, 128), FP8), "w.weight_scale_inv": ((2, 1), F32)})
    expected = "w.weight: block [1, 0] of 128 x 128: its groups' scales go from 2^-27 to 2^6, a spread of 2^33"
    for other in (model, keeps_fp4()):
        assert failure(other, tmp_path).startswith(f"{tmp_path / SINGLE_NAME}: {expected}")
    model = stand_in({"w.weight": ((200, 128), F32)})
    load_weights(model, tmp_path, progress=False)
    assert model.w.weight[130, 0] == 2.0**-28


SCALE = "w.weight_scale_inv"


@pytest.mark.parametrize("dtype", [FP8, F32, "FP4"])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"w.weight": None}, "w.weight: missing; expected "),
        ({SCALE: None}, f"w.weight is I8 and its scale {SCALE} is missing; expected F8_E8M0 [200, 4]"),
        ({SCALE: torch.ones(200, 4)}, f"{SCALE} is F32 [200, 4]; expected F8_E8M0 [200, 4] for the [200, 64] weight"),
        ({SCALE: powers(torch.zeros(2, 1))}, f"{SCALE} is F8_E8M0 [2, 1]; expected F8_E8M0 [200, 4] for the [200, 64]"),
        ({"w.weight": torch.zeros(200, 32, dtype=torch.int8)}, "w.weight has shape [200, 64]; expected [200, 128]"),
    ],
)
def test_fp4_that_does_not_fit(tmp_path, fp4, dtype, changes, expected):
    save_file({name: x for name, x in (fp4 | changes).items() if x is not None}, tmp_path / SINGLE_NAME)
    wanted = {"w.weight": ((200, 128), dtype)} | ({SCALE: ((2, 1), F32)} if dtype == FP8 else {})
    assert expected in failure(keeps_fp4() if dtype == "FP4" else stand_in(wanted), tmp_path)


def test_fp4_of_half_a_group(tmp_path):
    stored = {"a": torch.zeros(4, 24, dtype=torch.int8), "a_scale_inv": powers(torch.zeros(4, 2))}
    save_file(stored, tmp_path / SINGLE_NAME)
    message = failure(stand_in({"a": ((4, 48), BF16)}), tmp_path)
    assert "a is I8 [4, 24]; FP4 has groups of 32 columns, got 48 columns" in message
