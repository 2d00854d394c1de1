"""write_indexer_cache and read_indexer_cache on the GPU: sizes of keys and pages, every byte value, strided rows, and
offsets that need 64 bits."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from tests.gpu.case_checks import by_sizes, check_far_pages, grid

CASES = WRITE, READ, INTO = cases_of("indexer_cache")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@by_sizes(
    *(
        grid(d=(32, 64, 128), page_size=[page_size], pages=[pages], slot_dtype=(torch.int32, torch.int64))
        for page_size, pages in ((4, 391), (64, 27), (1000, 3))
    )
)
def test_slots_inside_and_outside_the_cache_are_right(sizes, case):
    case.verify("cuda", **sizes, **({"outside": True} if case is WRITE else {}))


@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_all_bytes_of_strided_rows_are_written(tokens):
    given = WRITE.arguments("cuda", tokens=tokens)
    wide = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(tokens, 1).view(torch.float8_e4m3fn)
    for k in (wide[:, 128:], wide[:, :128]):
        WRITE.check_call(given | {"k": k})


@pytest.mark.parametrize("d", [32, 64, 128])
def test_nothing_between_the_rows_of_results_is_written(d):
    given = INTO.arguments("cuda", tokens=777, d=d)
    rows = torch.full((779, d + 48), 77, dtype=torch.uint8, device="cuda")
    scales = torch.full((779, 3), 77.0, device="cuda")
    INTO.check_call(given | {"k": rows.view(torch.float8_e4m3fn)[1:-1, 16 : 16 + d], "k_scale": scales[1:-1, 1]})
    rows[1:-1, 16 : 16 + d], scales[1:-1, 1] = 77, 77
    assert (rows == 77).all() and (scales == 77).all()


def test_a_cache_without_pages_reads_as_zeros():
    given = READ.arguments("cuda", tokens=5)
    k, k_scale = dsa.read_indexer_cache(given["cache"][:0], given["slots"])
    assert not k.float().any() and not k_scale.any() and k.shape == (5, 128)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pages_far_apart_have_the_same_bytes(case):
    check_far_pages(case, tokens=300)
