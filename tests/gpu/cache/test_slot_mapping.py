"""Slots: exactly those of the definition, for new tokens, all tokens, entries and rings, whatever the numbers are."""

import itertools

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.testing import poison_free_memory

CASE, _, ALL = cases_of("slot_mapping")
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
GARBAGE = [INT_MIN, INT_MAX, -1, 0, 1, 7, 1000, INT_MIN + 1, INT_MAX - 1, 2**30]
OPTIONS = [{"ratio": ratio, "ring": ring} for ratio, ring in itertools.product((1, 4, 128), (False, True))]
by_options = pytest.mark.parametrize("options", OPTIONS, ids=str)


def int32(values):
    return torch.as_tensor(values, dtype=torch.int32, device="cuda")


def check(given, **changes):
    poison_free_memory(mebibytes=64)
    given = given | changes
    (slots,) = found = CASE.results(given)
    CASE.check(given, found)
    return slots


def call(table, bounds, lengths, num_tokens, page_size, ratio=1, ring=False):
    tensors = {"block_table": int32(table), "cu_seqlens": int32(bounds)}
    tensors["cache_seqlens"] = None if lengths is None else int32(lengths)
    return tensors | {"num_tokens": num_tokens, "page_size": page_size, "ratio": ratio, "ring": ring}


@by_options
@pytest.mark.parametrize("sequences", [1, 2, 3, 4, 5, 33, 500])
def test_tokens_of_sequences(sequences, options):
    """Chunks, whole sequences, empty ones, such with more tokens than the cache has, and missing pages."""
    for page_size, pages in ((1, 300), (48, 7), (64, 3), (128, 1)):
        sizes = {"sequences": sequences, "page_size": page_size, "pages": pages, "first": 2, **options}
        for case in (CASE, ALL):
            check(case.arguments("cuda", **sizes))
        given = CASE.arguments("cuda", **sizes)
        check(given, cache_seqlens=given["cache_seqlens"] - 100)


@by_options
@pytest.mark.parametrize("sequences", [1, 2, 127, 128, 129, 1000])
def test_decoding(sequences, options):
    given = CASE.arguments("cuda", sequences=sequences, most=1, earlier=600, pages=9, page_size=64, **options)
    check(given, cu_seqlens=int32(range(sequences + 1)), num_tokens=sequences)


@pytest.mark.parametrize("num_tokens", [0, 1, 127, 128, 129, 1000])
def test_tokens_of_no_sequence(num_tokens):
    for bounds in ([0, 0], [3, 3], [2, 4], [900, 20]):
        check(call([[5]], bounds, None, num_tokens, 64))
    for shape in ((0, 3), (2, 0), (0, 0)):
        check(call(torch.zeros(shape), [0] * (shape[0] + 1), None, num_tokens, 64))


def test_long_sequences():
    table = torch.randint(0, INT_MAX, (3, 3200))
    for lengths, options in itertools.product((None, [70_001, 9, 204_000]), OPTIONS):
        check(call(table, [0, 70_001, 70_001, 200_000], lengths, 200_000, 64, **options))
    for page_size, ratio in ((2**30, 1), (2**30, 2**30), (1, 2**30), (2**29 + 1, 3)):
        for ring in (False, True):
            check(call([[3, 4]], [0, 9], [INT_MAX], 9, page_size, ratio, ring))


def test_slots_beyond_2_to_the_31():
    table = [[2**25 - 1, 2**25], [INT_MAX, INT_MIN]]
    slots = check(call(table, [0, 2, 4], [65, 65], 4, 64))
    assert slots.tolist() == [2**31 - 1, 2**31, INT_MAX * 64 + 63, -1]
    slots = check(call([[INT_MAX]], [0, 1], [2**30], 1, 2**30))
    assert slots.tolist() == [INT_MAX * 2**30 + 2**30 - 1]


def garbage(*shape):
    return int32(GARBAGE)[torch.randint(len(GARBAGE), shape, device="cuda")]


@by_options
@pytest.mark.parametrize("sequences", [8, 17, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_anything_in_the_numbers(seed, sequences, options):
    """Also more sequences than one CTA compares at once, with boundaries in any order."""
    torch.manual_seed(seed)
    sizes = {"sequences": sequences, "most": 30, "earlier": 370, "pages": 6, **options}
    given, edges = CASE.arguments("cuda", seed, **sizes), sequences + 1
    bounds, some = given["cu_seqlens"], torch.rand(edges, device="cuda") < 0.3
    one_wrong = bounds.clone()
    one_wrong[sequences // 2] = garbage(1)
    for page_size in (1, 64, 2**30):
        given["page_size"] = page_size
        check(given, cu_seqlens=one_wrong)
        few = given | {"num_tokens": 200}
        check(few, block_table=garbage(sequences, 6))
        check(few, cache_seqlens=garbage(sequences))
        for wrong in (garbage(edges), garbage(edges).sort().values, garbage(edges).where(some, bounds)):
            check(few, cu_seqlens=wrong)
            check(few, cu_seqlens=wrong, cache_seqlens=None)
        check(few, block_table=garbage(sequences, 6), cu_seqlens=garbage(edges), cache_seqlens=garbage(sequences))


def test_strides():
    """Parts of larger tensors with other numbers around them."""
    given = CASE.arguments("cuda", sequences=30, pages=9, page_size=16, ratio=1)
    expected, table = check(given), given["block_table"]
    apart = {name: torch.stack((given[name], -given[name]), 1)[:, 0] for name in ("cu_seqlens", "cache_seqlens")}
    for other in (torch.nn.functional.pad(table, (1, 2), value=-7)[:, 1:10], table.T.contiguous().T):
        assert torch.equal(dsa.slot_mapping(**given | apart | {"block_table": other}), expected)
    check(given, block_table=table[:1].expand(30, 9))
