"""vLLM's FP8 linear layers with the plugin, on stand-ins for vLLM's kernel and layer."""

from types import SimpleNamespace as Space

import pytest
import torch

from dsa.runtime.variants import growing
from dsa_engines import products
from dsa_engines.vllm import linear
from tests.engines.test_products import assert_near, cast, fp8_weights
from tests.engines.vllm.stand_in import Original, never

ROWS, COLUMNS, MOST = 192, 256, 3


pytestmark = pytest.mark.usefixtures("nothing_is_compiled")


def kernel_of(name=linear.KERNEL, dtype=torch.bfloat16, use_ue8m0=True):
    return type(name, (Space,), {})(config=Space(out_dtype=dtype), use_deep_gemm_e8m0=use_ue8m0)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_a_layer_is_computed_with_the_scales_of_the_engines_kernel(use_ue8m0, with_bias):
    weight, scale, wide = fp8_weights(ROWS, COLUMNS)
    x, bias = torch.randn(2, 4, COLUMNS).bfloat16(), torch.randn(ROWS).bfloat16() if with_bias else None
    kernel, layer = kernel_of(use_ue8m0=use_ue8m0), Space(weight=weight, weight_scale_inv=scale)
    y = linear.apply_weights(never, MOST)(kernel, layer, x, bias)
    assert_near(y, cast(x, use_ue8m0) @ wide.T + (bias if with_bias else 0))


@pytest.mark.parametrize(
    ("kernel", "scale", "options"),
    [
        ({"name": "CutlassFp8BlockScaledMMKernel"}, torch.float32, {}),
        ({"dtype": torch.float16}, torch.float32, {}),
        ({}, None, {}),
        ({}, torch.float8_e8m0fnu, {}),
        ({}, torch.float32, {"input_scale": 1.0}),
    ],
)
def test_other_layers_are_left_to_the_engine(kernel, scale, options):
    weight, found, _ = fp8_weights(ROWS, COLUMNS)
    original, kernel = Original(), kernel_of(**kernel)
    layer = Space(weight=weight) if scale is None else Space(weight=weight, weight_scale_inv=found.to(scale))
    x, bias = torch.randn(2, COLUMNS).bfloat16(), torch.randn(ROWS)
    assert linear.apply_weights(original, MOST)(kernel, layer, x, bias, **options) == "vLLM's own"
    original.assert_called_once((kernel, layer, x, bias), options)


@pytest.mark.parametrize(("columns", "most"), [(640, MOST), (512, 4 * MOST)])
def test_the_first_layer_of_a_shape_compiles_for_all_numbers_of_tokens(monkeypatch, columns, most):
    """Latents, of 512 channels, are also those of earlier tokens."""
    tokens = []
    monkeypatch.setattr(products, "linear", lambda x, *rest: tokens.append(len(x)) or x)
    weight, scale, _ = fp8_weights(ROWS, columns)
    apply = linear.apply_weights(never, MOST)
    for _ in range(2):
        apply(kernel_of(), Space(weight=weight, weight_scale_inv=scale), torch.zeros(7, columns).bfloat16())
    assert tokens == [*growing(most, 1.3), 7, 7]


def test_a_layer_whose_kernels_do_not_compile_is_left_to_the_engine(monkeypatch):
    monkeypatch.setattr(products, "linear", never)
    weight, scale, _ = fp8_weights(ROWS, COLUMNS)
    given = kernel_of(), Space(weight=weight, weight_scale_inv=scale), torch.zeros(2, COLUMNS).bfloat16()
    original = Original()
    for _ in range(2):
        assert linear.apply_weights(original, MOST)(*given) == "vLLM's own"
    assert len(original.calls) == 2
