"""Loading of quantised weights: FP8 with scales of different dtypes, and packed FP4."""

import pytest
import torch

from dsa import fp4_block_scales, widen_fp4
from dsa.reference import dequantize_fp4
from dsa_layers.io.directory import SINGLE_NAME
from tests.layers.io.stand_ins import BF16, F32, FP8, assert_same_tensors, failure, like, loaded, powers, write

E8M0 = torch.float8_e8m0fnu
SCALE = "w.weight_scale_inv"
WIDENED = {"w.weight": ((200, 128), FP8), SCALE: ((2, 1), F32)}
KEPT = {"w.weight": ((200, 64), torch.int8), SCALE: ((200, 4), E8M0), "w.weight_block_scale": ((2, 1), F32)}


@pytest.fixture
def fp4():
    """Return {name: tensor}: a packed FP4 weight [200, 64] of 200 x 128 values, and its scales [200, 4]."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(-128, 128, (200, 64), dtype=torch.int8, generator=generator)
    return {"w.weight": packed, SCALE: powers(torch.randint(-9, 6, (200, 4), generator=generator))}


@pytest.mark.parametrize("dtype", [E8M0, F32])
def test_fp8_scales_of_either_dtype_are_loaded_as_fp32(tmp_path, dtype):
    exponents = torch.arange(10).view(5, 2) - 127
    q = torch.full((576, 200), 2.0).to(FP8)
    stored = {"w.weight": q, SCALE: powers(exponents).to(dtype)}
    expected = {"w.weight": q, SCALE: torch.ldexp(torch.ones(5, 2), exponents)}
    assert_same_tensors(loaded(like(expected), tmp_path, stored).state_dict(), expected)
    model = loaded({"w.weight": ((576, 200), F32)}, tmp_path)
    assert torch.equal(model.w.weight[::128, ::128], 2 * expected[SCALE])


# The weight is in a submodule or in the root module. The loader computes block scales and ignores stored ones.
@pytest.mark.parametrize("name", ["w.weight", "weights"])
@pytest.mark.parametrize("kept", [True, False])
def test_fp4_is_kept_or_widened_to_fp8(tmp_path, fp4, name, kept):
    packed, scale = fp4.values()
    expected = dict(zip((name, f"{name}_scale_inv"), fp4.values() if kept else widen_fp4(packed, scale)))
    stored = {name: packed, f"{name}_scale_inv": scale}
    if kept:
        expected[f"{name}_block_scale"] = fp4_block_scales(packed, scale)
        stored[f"{name}_block_scale"] = torch.ones(3)
    assert_same_tensors(loaded(like(expected), tmp_path, stored).state_dict(), expected)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_fp4_is_dequantised(tmp_path, fp4, dtype):
    write(tmp_path, {"w.weight": fp4["w.weight"]}, {SCALE: fp4[SCALE]})
    model = loaded({"w.weight": ((200, 128), dtype)}, tmp_path)
    assert torch.equal(model.w.weight, dequantize_fp4(*fp4.values(), dtype))


def test_int8_is_not_fp4_where_the_model_wants_int8(tmp_path):
    stored = {"a": torch.ones(4, 4, dtype=torch.int8)}
    assert loaded(like(stored), tmp_path, stored).a.eq(1).all()


def test_fp4_that_fp8_cannot_hold_is_refused_unless_it_is_dequantised(tmp_path, fp4):
    fp4["w.weight"][130, :16], fp4["w.weight"][131, :16] = 0x11, 0x77
    scale = fp4[SCALE].view(torch.uint8)
    scale[130, 0], scale[131, 0] = 100, 127 + 6
    expected = "w.weight: block [1, 0] of 128 x 128: its groups' scales go from 2^-27 to 2^6, a spread of 2^33"
    for wanted in (WIDENED, KEPT):
        assert failure(wanted, tmp_path, fp4).startswith(f"{tmp_path / SINGLE_NAME}: {expected}")
    assert loaded({"w.weight": ((200, 128), F32)}, tmp_path).w.weight[130, 0] == 2.0**-28


@pytest.mark.parametrize("wanted", [WIDENED, KEPT, {"w.weight": ((200, 128), F32)}])
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
def test_fp4_that_does_not_fit_is_refused(tmp_path, fp4, wanted, changes, expected):
    stored = {name: x for name, x in (fp4 | changes).items() if x is not None}
    assert expected in failure(wanted, tmp_path, stored)


def test_half_a_group_of_fp4_is_refused(tmp_path):
    stored = {"a": torch.zeros(4, 24, dtype=torch.int8), "a_scale_inv": powers(torch.zeros(4, 2))}
    expected = "a is I8 [4, 24]; FP4 has groups of 32 columns, got 48 columns"
    assert expected in failure({"a": ((4, 48), BF16)}, tmp_path, stored)
