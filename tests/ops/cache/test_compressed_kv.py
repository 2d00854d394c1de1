"""Launches of `write_compressed_kv`: the op does not copy kv and gate. It also launches the kernel for a cache without
pages, because the kernel updates the state as well."""

import pytest
import torch

import dsa
from dsa.cases import cases_of

CASE = cases_of("compressed_kv")[2]


def test_halves_of_one_projection_are_not_copied(launches):
    given = CASE.arguments(layout="bfloat16")
    kv, gate = torch.randn(7, 2048).split(1024, 1)
    dsa.write_compressed_kv(**given | {"kv": kv, "gate": gate})
    ((_, passed),) = launches
    assert passed[0] is kv and passed[1] is gate
    assert [x.stride() for x in passed[:2]] == [(2048, 1)] * 2


@pytest.mark.parametrize(("d", "layout"), [(512, "bfloat16"), (512, "v4"), (128, "index")])
def test_a_cache_without_pages_is_launched_for_the_state(launches, d, layout):
    given = CASE.arguments(d=d, layout=layout)
    launches.clear()  # making a V4 cache launches a kernel that fills it
    dsa.write_compressed_kv(**given | {"cache": given["cache"][:0], "slots": torch.full((7,), -1)})
    ((_, passed),) = launches
    assert passed[6].shape[:2] == (0, 16) and passed[10] is given["state"] and passed[-2] == 16
