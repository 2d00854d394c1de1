"""The bridge of the compressor: what it launches, what it refuses, and the reference where no kernel runs."""

import pytest
import torch

import dsa
from dsa import reference
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


def test_runs_the_reference_without_a_gpu():
    ours, theirs = arguments(), arguments()
    for name, value in ours.items():
        theirs[name] = value.clone() if isinstance(value, torch.Tensor) else value
    dsa.write_compressed_kv(**ours)
    reference.write_compressed_kv(**theirs)
    assert torch.equal(ours["cache"], theirs["cache"]) and torch.equal(ours["state"], theirs["state"])
    assert ours["cache"].view(-1, 512)[0].any()


@pytest.mark.parametrize(
    ("options", "variant", "width"),
    [
        ({}, (torch.float32, 512, 4, True, "bfloat16"), 512),
        ({"kind": "v4", "dtype": torch.bfloat16}, (torch.bfloat16, 512, 4, True, "v4"), 576),
        ({"m": 128, "overlap": False, "kind": "v4"}, (torch.float32, 512, 128, False, "v4"), 576),
        ({"d": 128, "kind": "index"}, (torch.float32, 128, 4, True, "index"), 132),
        ({"d": 128}, (torch.float32, 128, 4, True, "bfloat16"), 128),
    ],
)
def test_what_is_launched(launches, options, variant, width):
    given = arguments(**options)
    dsa.write_compressed_kv(**given, eps=0.5)
    ((found, passed),) = launches
    assert found == variant and passed[-2:] == (16, 0.5)
    assert passed[6].shape[-1] == width and passed[6].data_ptr() == given["cache"].data_ptr()
    assert passed[7].dtype == torch.int32 and passed[7].shape == (18,)  # the words of int64 slots


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


def test_opcheck():
    given = arguments()
    values = [*[v for k, v in given.items() if k != "overlap"], True, 1e-6]
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.dsa.write_compressed_kv, tuple(values), test_utils=tests)
