"""The bridge of the compressor: what it passes on as it is, and a cache without pages."""

import pytest
import torch

import dsa


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


@pytest.mark.parametrize(("d", "kind"), [(512, "bfloat16"), (512, "v4"), (128, "index")])
def test_a_cache_without_pages_is_launched_for_the_state(launches, d, kind):
    given = arguments(d=d, kind=kind)
    given |= {"cache": given["cache"][:0], "slots": torch.full((9,), -1)}
    dsa.write_compressed_kv(**given)
    ((_, passed),) = launches
    assert passed[6].shape[:2] == (0, 16) and passed[10] is given["state"] and passed[-2] == 16
