"""SGLang's FP8 linear layers with the plugin, on stand-ins for SGLang's method and layer."""

import functools
from types import SimpleNamespace as Space

import pytest
import torch

from dsa.runtime.variants import growing
from dsa_engines import products
from dsa_engines.sglang import linear
from tests.engines.test_products import assert_near, cast, fp8_weights

ROWS, COLUMNS, MOST = 192, 640, 3

pytestmark = pytest.mark.usefixtures("nothing_is_compiled")


def named(name):
    def function(*args, **options):
        raise AssertionError("SGLang's own kernel was called")

    function.__name__ = name
    return function


KERNEL = named(linear.KERNEL)


def method_of(kernel=KERNEL, block_size=(128, 128), as_mxfp8=False):
    return Space(
        w8a8_block_fp8_linear=kernel,
        block_quant=block_size is not None,
        weight_block_size=block_size and [*block_size],
        block_fp8_as_mxfp8=as_mxfp8,
    )


def never(*args):
    raise AssertionError("SGLang's own method was called")


apply = linear.apply(lambda: MOST)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_a_layer_is_computed_with_the_scales_of_the_engines_kernel(use_ue8m0, with_bias):
    weight, scale, wide = fp8_weights(ROWS, COLUMNS)
    x, bias = torch.randn(2, 4, COLUMNS).bfloat16(), torch.randn(ROWS).bfloat16() if with_bias else None
    kernel = functools.partial(KERNEL, act_scale_ue8m0=True) if use_ue8m0 else KERNEL
    y = apply(never, method_of(kernel), Space(weight=weight, weight_scale_inv=scale), x, bias)
    assert_near(y, cast(x, use_ue8m0) @ wide.T + (bias if with_bias else 0))


@pytest.mark.parametrize(
    ("method", "scale", "change"),
    [
        ({"kernel": named("triton_w8a8_block_fp8_linear")}, torch.float32, lambda x: x),
        ({"kernel": functools.partial(KERNEL, other=1)}, torch.float32, lambda x: x),
        ({"kernel": None}, torch.float32, lambda x: x),
        ({"block_size": None}, torch.float32, lambda x: x),
        ({"block_size": (32, 32)}, torch.float32, lambda x: x),
        ({"as_mxfp8": True}, torch.float32, lambda x: x),
        ({}, None, lambda x: x),
        ({}, torch.int32, lambda x: x),
        ({}, torch.float32, lambda x: x.half()),
        ({}, torch.float32, lambda x: (x.to(torch.float8_e4m3fn), x)),  # cast before
    ],
)
def test_other_layers_are_left_to_the_engine(method, scale, change):
    weight, found, _ = fp8_weights(ROWS, COLUMNS)
    layer = Space(weight=weight) if scale is None else Space(weight=weight, weight_scale_inv=found.to(scale))
    given = method_of(**method), layer, change(torch.randn(2, COLUMNS).bfloat16()), torch.randn(ROWS)
    calls = []
    assert apply(lambda *args: calls.append(args) or "SGLang's own", *given) == "SGLang's own"
    assert [[*map(id, call)] for call in calls] == [[*map(id, given)]]


def test_the_first_layer_of_a_shape_compiles_for_all_numbers_of_tokens(monkeypatch):
    tokens = []
    monkeypatch.setattr(products, "linear", lambda x, *rest: tokens.append(len(x)) or x)
    weight, scale, _ = fp8_weights(ROWS, COLUMNS)
    for _ in range(2):
        apply(never, method_of(), Space(weight=weight, weight_scale_inv=scale), torch.zeros(7, COLUMNS).bfloat16())
    assert tokens == [*growing(MOST, 1.3), 7, 7]


def test_a_layer_whose_kernels_do_not_compile_is_left_to_the_engine(monkeypatch):
    monkeypatch.setattr(products, "linear", never)
    weight, scale, _ = fp8_weights(ROWS, COLUMNS)
    given = method_of(), Space(weight=weight, weight_scale_inv=scale), torch.zeros(2, COLUMNS).bfloat16()
    assert apply(lambda *args: "SGLang's own", *given) == "SGLang's own"
