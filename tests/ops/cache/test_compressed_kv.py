"""The bridge of the compressor: what it launches, what it refuses, and the reference where no kernel runs."""

import pytest
import torch

import dsa
from dsa.ops.cache import compressed_kv as op  # noqa: F401 -- `launches` looks at it


def arguments(d=512, m=4, overlap=True, kind="bfloat16", dtype=torch.float32, tokens=9):
    c, n = (2 * d, 2 * m) if overlap else (d, m)
    if kind == "index":
        cache = torch.zeros(3, 16, 1, d + 4, dtype=torch.uint8)
    elif kind == "v4":
        cache = dsa.make_v4_cache(3, 16)
    else:
        cache = torch.zeros(3, 16, 1, d, dtype=getattr(torch, kind))
    slots = torch.full((tokens,), -1)
    slots[m - 1 :: m] = torch.arange(len(slots[m - 1 :: m]))
    return {
        "kv": torch.randn(tokens, c).to(dtype), "gate": torch.randn(tokens, c).to(dtype), "ape": torch.randn(m, c),
        "norm_weight": torch.rand(d), "cos": torch.rand(tokens, 32), "sin": torch.rand(tokens, 32), "cache": cache,
        "slots": slots, "cu_seqlens": torch.tensor([0, tokens - 2, tokens], dtype=torch.int32),
        "starts": torch.tensor([0, 6], dtype=torch.int32), "state": torch.randn(4, n, 2, c),
        "state_slots": torch.tensor([3, 1], dtype=torch.int32), "overlap": overlap,
    }  # fmt: skip


def test_halves_of_one_projection_are_not_copied(launches):
    given, both = arguments(), torch.randn(9, 2048)
    given["kv"], given["gate"] = both.split(1024, 1)
    dsa.write_compressed_kv(**given)
    ((_, passed),) = launches
    assert passed[0] is given["kv"] and passed[1] is given["gate"]
    assert [x.stride() for x in passed[:2]] == [(2048, 1)] * 2


def test_nothing_to_do(launches):
    given = arguments()
    for name in ("kv", "gate", "cos", "sin", "slots"):
        given[name] = given[name][:0]
    given["cu_seqlens"] = torch.zeros(3, dtype=torch.int32)
    dsa.write_compressed_kv(**given)
    assert not launches


@pytest.mark.parametrize(("d", "kind"), [(512, "bfloat16"), (512, "v4"), (128, "index")])
def test_a_cache_without_pages_is_launched_for_the_state(launches, d, kind):
    given = arguments(d=d, kind=kind)
    given |= {"cache": given["cache"][:0], "slots": torch.full((9,), -1)}
    dsa.write_compressed_kv(**given)
    ((_, passed),) = launches
    assert passed[6].shape[:2] == (0, 16) and passed[10] is given["state"] and passed[-2] == 16


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"dtype": torch.float16}, {}, "kv: the kernel takes fp32 and bf16, got float16"),
        ({"m": 8}, {}, "ape: the kernel takes entries of channels and tokens 512 of 4 with overlap"),
        ({"overlap": False}, {}, "got 512 of 4 without"),
        (
            {},
            {"cos": torch.rand(9, 16), "sin": torch.rand(9, 16)},
            "cos: the kernel rotates R 64 channels, got 32",
        ),
        ({}, {"state": torch.randn(4, 8, 2, 2048)[..., ::2]}, "state: must be contiguous"),
        ({}, {"kv": torch.randn(9, 2048)[:, ::2]}, "kv: the last dimension must be contiguous"),
        ({}, {"kv": torch.randn(9, 1025)[:, 1:]}, "kv: rows must start at multiples of 16 bytes"),
        ({}, {"slots": torch.full((18,), -1)[::2]}, "slots: must be contiguous"),
    ],
)
def test_errors_of_the_kernel(launches, options, changes, message):
    with pytest.raises(ValueError, match=message):
        dsa.write_compressed_kv(**(arguments(**options) | changes))
    assert not launches
