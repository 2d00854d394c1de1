"""slot_mapping on the GPU equals the definition (`mapped` in dsa/cases/cache.py): for new tokens and whole sequences,
for compressed entries (ratio > 1) and ring buffers, and for any numbers in the index tensors."""

import itertools

import pytest
import torch

from dsa.cases import cases_of
from tests.gpu.attention import checked, int32
from tests.gpu.case_checks import by_sizes, check_layouts, grid

CASE, _, ALL = cases_of("slot_mapping")
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
GARBAGE = [INT_MIN, INT_MAX, -1, 0, 1, 7, 1000, INT_MIN + 1, INT_MAX - 1, 2**30]
OPTIONS = grid(ratio=(1, 4, 128), ring=(False, True))
by_options = pytest.mark.parametrize("options", OPTIONS, ids=str)


def call(table, bounds, lengths, num_tokens, page_size, ratio=1, ring=False):
    tensors = {"block_table": int32(table), "cu_seqlens": int32(bounds)}
    tensors["cache_seqlens"] = None if lengths is None else int32(lengths)
    return tensors | {"num_tokens": num_tokens, "page_size": page_size, "ratio": ratio, "ring": ring}


@by_options
@by_sizes(
    *(
        grid(sequences=(1, 2, 3, 4, 5, 33, 500), page_size=[page_size], pages=[pages], first=[2])
        for page_size, pages in ((1, 300), (48, 7), (64, 3), (128, 1))
    )
)
def test_tokens_of_sequences_are_right(sizes, options):
    for case in (CASE, ALL):
        checked(case, case.arguments("cuda", **sizes, **options))
    given = CASE.arguments("cuda", **sizes, **options)
    checked(CASE, given | {"cache_seqlens": given["cache_seqlens"] - 100})


@by_options
@pytest.mark.parametrize("sequences", [1, 2, 127, 128, 129, 1000])
def test_single_tokens_are_right(sequences, options):
    given = CASE.arguments("cuda", sequences=sequences, most=1, earlier=600, pages=9, page_size=64, **options)
    checked(CASE, given | {"cu_seqlens": int32(range(sequences + 1)), "num_tokens": sequences})


@pytest.mark.parametrize("num_tokens", [0, 1, 127, 128, 129, 1000])
def test_tokens_of_no_sequence_have_no_slot(num_tokens):
    for bounds in ([0, 0], [3, 3], [2, 4], [900, 20]):
        checked(CASE, call([[5]], bounds, None, num_tokens, 64))
    for shape in ((0, 3), (2, 0), (0, 0)):
        checked(CASE, call(torch.zeros(shape), [0] * (shape[0] + 1), None, num_tokens, 64))


@by_options
@pytest.mark.parametrize("lengths", [None, [70_001, 9, 204_000]])
def test_long_sequences_are_right(lengths, options):
    table = torch.randint(0, INT_MAX, (3, 3200))
    checked(CASE, call(table, [0, 70_001, 70_001, 200_000], lengths, 200_000, 64, **options))


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("page_size, ratio", [(2**30, 1), (2**30, 2**30), (1, 2**30), (2**29 + 1, 3)])
def test_slots_of_the_longest_sequence_are_right(page_size, ratio, ring):
    checked(CASE, call([[3, 4]], [0, 9], [INT_MAX], 9, page_size, ratio, ring))


def test_slots_beyond_32_bits_are_right():
    for given, expected in (
        (call([[2**25 - 1, 2**25], [INT_MAX, INT_MIN]], [0, 2, 4], [65, 65], 4, 64), [2**31 - 1, 2**31, 2**37 - 1, -1]),
        (call([[INT_MAX]], [0, 1], [2**30], 1, 2**30), [2**61 - 1]),
    ):
        assert checked(CASE, given)[0].tolist() == expected


def garbage(*shape):
    return int32(GARBAGE)[torch.randint(len(GARBAGE), shape, device="cuda")]


@by_options
@pytest.mark.parametrize("page_size", [1, 64, 2**30])
@pytest.mark.parametrize("sequences", [8, 17, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_any_numbers_give_the_slots_of_the_definition(seed, sequences, page_size, options):
    """With 17 or more sequences the kernel first checks whether the boundaries ascend. With 8 it does not."""
    torch.manual_seed(seed)
    sizes = {"sequences": sequences, "most": 30, "earlier": 370, "pages": 6, "page_size": page_size}
    given = CASE.arguments("cuda", seed, **sizes, **options)
    bounds, one_wrong, few = given["cu_seqlens"], given["cu_seqlens"].clone(), given | {"num_tokens": 200}
    one_wrong[sequences // 2] = garbage(1)
    checked(CASE, given | {"cu_seqlens": one_wrong})
    wrong = {name: garbage(*given[name].shape) for name in ("block_table", "cu_seqlens", "cache_seqlens")}
    checked(CASE, few | wrong)
    for name, x in wrong.items():
        checked(CASE, few | {name: x})
    some = torch.rand(len(bounds), device="cuda") < 0.3
    numbers = (wrong["cu_seqlens"], wrong["cu_seqlens"].sort().values, wrong["cu_seqlens"].where(some, bounds))
    for x, lengths in itertools.product(numbers, (given["cache_seqlens"], None)):
        checked(CASE, few | {"cu_seqlens": x, "cache_seqlens": lengths})


def test_layouts_change_no_bit():
    names = ("block_table", "cu_seqlens", "cache_seqlens")
    check_layouts(CASE, names, sequences=30, pages=9, page_size=16, ratio=1)
