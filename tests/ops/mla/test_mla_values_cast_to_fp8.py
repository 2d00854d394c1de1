"""The bridge of mla_values_cast_to_fp8, on a CPU."""

import pytest
import torch
from torch import library

import dsa
from dsa.ops.mla import mla_values_cast_to_fp8 as op  # noqa: F401 -- `launches` looks at it
from dsa.reference.mla import mla_values_cast_to_fp8 as reference


def operands(tokens=3, heads=2, rows=256, latent=512):
    return torch.randn(tokens, heads, latent).bfloat16(), dsa.per_block_cast_to_fp8(torch.randn(heads * rows, latent))


def test_runs_the_reference_without_a_gpu():
    given = operands()
    for got, expected in zip(
        dsa.mla_values_cast_to_fp8(*given, 128), reference.mla_values_cast_to_fp8(*given, 128), strict=True
    ):
        assert torch.equal(got.float(), expected.float())


@pytest.mark.parametrize("use_ue8m0", [True, False])
def test_what_the_kernel_gets(use_ue8m0, launches):
    attended, kv_b = operands(rows=448)
    q, scale = dsa.mla_values_cast_to_fp8(attended, kv_b, 256, use_ue8m0)
    [(variant, (of_attended, weight, weight_scale, values, scales))] = launches
    assert variant == (use_ue8m0,) and of_attended is attended and weight is kv_b[0] and weight_scale is kv_b[1]
    assert values is q and q.shape == (3, 512) and q.dtype == torch.float8_e4m3fn
    assert scales is scale and scale.shape == (3, 4) and scale.dtype == torch.float32


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"latent": 256}, r"kv_b\[0\]: the kernel takes 512 columns, got shape \[512, 256\]"),
        ({"rows": 264}, r"kv_b\[0\]: the kernel takes a multiple of 32 rows a head, got 528 for 2 heads"),
    ],
)
def test_what_the_kernel_does_not_take(sizes, message, launches):
    with pytest.raises(ValueError, match=message):
        dsa.mla_values_cast_to_fp8(*operands(**sizes), 128)
    assert not launches


def test_nothing_to_compute_launches_nothing(launches):
    dsa.mla_values_cast_to_fp8(*operands(tokens=0), 128)
    dsa.mla_values_cast_to_fp8(*operands(heads=0), 128)
    assert not launches


def test_is_one_node_of_a_compiled_graph():
    attended, kv_b = operands()
    compiled = torch.compile(dsa.mla_values_cast_to_fp8, fullgraph=True, backend="aot_eager")
    for got, expected in zip(
        compiled(attended, kv_b, 128), dsa.mla_values_cast_to_fp8(attended, kv_b, 128), strict=True
    ):
        assert torch.equal(got.float(), expected.float())
    # torch cannot compare float8 inputs before and after, as the schema's test does.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    given = attended, *kv_b, 128, True
    library.opcheck(torch.ops.dsa.mla_values_cast_to_fp8.default, given, test_utils=tests)
