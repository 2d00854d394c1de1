"""The cache of index keys in compiled graphs, and reading into tensors of the caller."""

import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.case import same_bits

WRITE, READ, _ = cases_of("indexer_cache")


def assert_same(got, expected):
    assert all(same_bits(x, y) for x, y in zip(got, expected, strict=True))


def test_a_compiled_graph_reads_what_it_wrote():
    given = WRITE.arguments(tokens=5)
    cache, slots, untouched = given["cache"], given["slots"], given["cache"].clone()

    def replace(k, k_scale, cache, slots):
        old = dsa.read_indexer_cache(cache, slots)
        dsa.write_indexer_cache(k, k_scale, cache, slots)
        return *old, *dsa.read_indexer_cache(cache, slots)

    got = torch.compile(replace, fullgraph=True, backend="aot_eager")(**given)
    assert_same(got[:2], dsa.read_indexer_cache(untouched, slots))
    assert_same(got[2:], dsa.read_indexer_cache(cache, slots))
    WRITE.check(given | {"cache": untouched}, [cache])


def test_results_in_tensors_of_the_caller():
    given = READ.arguments(tokens=5, d=32)
    expected = dsa.read_indexer_cache(**given)
    rows, scales = torch.full((7, 64), 77, dtype=torch.uint8), torch.full((7, 3), 77.0)
    given |= {"k": rows.view(torch.float8_e4m3fn)[1:6, 16:48], "k_scale": scales[1:6, 1]}
    got = dsa.read_indexer_cache(**given)
    assert got[0].data_ptr() == given["k"].data_ptr() and got[1].data_ptr() == given["k_scale"].data_ptr()
    assert_same(got, expected)
    rows[1:6, 16:48], scales[1:6, 1] = 77, 77
    assert (rows == 77).all() and (scales == 77).all()
    k, k_scale = dsa.read_indexer_cache(**given | {"cache": given["cache"][:0]})
    assert not k.view(torch.uint8).any() and not k_scale.any()
