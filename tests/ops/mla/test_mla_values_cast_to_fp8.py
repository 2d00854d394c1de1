"""The bridge of mla_values_cast_to_fp8, on a CPU."""

import pytest
import torch

import dsa
from dsa.ops.mla import mla_values_cast_to_fp8 as op  # noqa: F401 -- `launches` looks at it


def operands(tokens=3, heads=2, rows=256, latent=512):
    return torch.randn(tokens, heads, latent).bfloat16(), dsa.per_block_cast_to_fp8(torch.randn(heads * rows, latent))


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
