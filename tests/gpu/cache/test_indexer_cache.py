"""The cache of index keys: sizes of keys and pages, all bytes, strides, 64-bit offsets."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from tests.gpu.op_checks import assert_same_bits, far_apart

WRITE, READ, INTO = cases_of("indexer_cache")


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_size", [4, 64, 1000])
@pytest.mark.parametrize("d", [32, 64, 128])
def test_slots_inside_and_outside_the_cache(d, page_size, slot_dtype):
    sizes = {"d": d, "pages": 2 * -(-777 // page_size) + 1, "page_size": page_size, "slot_dtype": slot_dtype}
    WRITE.verify("cuda", outside=True, **sizes)
    READ.verify("cuda", **sizes)
    INTO.verify("cuda", **sizes)


@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_all_bytes_of_strided_rows(tokens):
    given = WRITE.arguments("cuda", tokens=tokens)
    wide = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(tokens, 1).view(torch.float8_e4m3fn)
    before = given["cache"].clone()
    for k in (wide[:, 128:], wide[:, :128]):
        WRITE.check(given | {"k": k, "cache": before}, WRITE.results(given | {"k": k}))


@pytest.mark.parametrize("d", [32, 64, 128])
def test_results_with_gaps_between_their_rows(d):
    given = INTO.arguments("cuda", tokens=777, d=d)
    rows = torch.full((779, d + 48), 77, dtype=torch.uint8, device="cuda")
    scales = torch.full((779, 3), 77.0, device="cuda")
    given |= {"k": rows.view(torch.float8_e4m3fn)[1:-1, 16 : 16 + d], "k_scale": scales[1:-1, 1]}
    INTO.check(given, INTO.results(given))
    rows[1:-1, 16 : 16 + d], scales[1:-1, 1] = 77, 77
    assert (rows == 77).all() and (scales == 77).all()


def test_a_cache_without_pages_reads_as_zeros():
    given = READ.arguments("cuda", tokens=5)
    k, k_scale = dsa.read_indexer_cache(given["cache"][:0], given["slots"])
    assert not k.float().any() and not k_scale.any() and k.shape == (5, 128)


def test_pages_far_apart():
    given = WRITE.arguments("cuda", tokens=300)
    cache, slots = far_apart(given["cache"]), given["slots"]
    dsa.write_indexer_cache(**given)
    dsa.write_indexer_cache(**given | {"cache": cache})
    assert_same_bits(cache, given["cache"])
    assert_same_bits(dsa.read_indexer_cache(cache, slots), dsa.read_indexer_cache(given["cache"], slots))
