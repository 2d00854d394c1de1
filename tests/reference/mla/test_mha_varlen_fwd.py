"""The references of mha_varlen_fwd and selection_bits: bit masks, separate rope channels, and wrong boundaries."""

import pytest
import torch

from dsa.cases import cases_of
from dsa.cases.mha import keys_of_bits
from dsa.reference.mla.mha_varlen_fwd import mha_varlen_fwd
from dsa.reference.mla.selection_bits import selected_keys, selection_bits
from tests.reference.common import INF, INT32, assert_same_bits, i32, zeros

(BITS,), MHA = cases_of("selection_bits"), cases_of("mha_varlen_fwd")[0]


def test_selected_keys_are_those_of_the_bits():
    bits = BITS.run(BITS.arguments(tokens=5, max_keys=300))[0]
    expected, more = keys_of_bits(bits), selected_keys(bits, 500)
    assert torch.equal(selected_keys(bits, 310), expected[:, :310])
    assert torch.equal(more[:, :384], expected) and not more[:, 384:].any()


def test_bits_of_starts_near_the_end_of_int32_are_right():
    given = BITS.arguments(tokens=5, top_k=3) | {"starts": i32([2**31 - 5] * 5)}
    given["indices"][:] = i32([2**31 - 1, 2**31 - 5, 2**31 - 4])
    BITS.check(given, BITS.run(given))


def test_without_starts_indices_count_from_the_first_key():
    indices = torch.randint(-5, 420, (5, 40), dtype=INT32)
    assert torch.equal(selection_bits(indices, None, 300), selection_bits(indices, i32([0] * 5), 300))


@pytest.mark.parametrize(("indices", "max_keys"), [((0, 3), 9), ((3, 0), 9), ((3, 2), 0)])
def test_no_indices_and_no_keys_set_no_bit(indices, max_keys):
    bits = selection_bits(zeros(*indices, dtype=INT32), i32([50] * indices[0]), max_keys)
    assert bits.shape == (indices[0], 4 * (max_keys > 0)) and not bits.any()


@pytest.mark.parametrize("causal", [False, True])
def test_queries_that_see_few_keys_see_all_of_them(causal):
    """Queries that see at most `dense_keys` keys ignore their selection bits. The kernel does the same."""
    given = MHA.arguments(top_k=3, causal=causal, heads=2, dims=(64, 64))
    results = [MHA.run(given | {"dense_keys": n}) for n in (0, 77)]
    for n, found in zip((0, 77), results):
        MHA.check(given | {"dense_keys": n}, found)
    # The first sequence has 77 queries and 77 keys.
    assert not torch.equal(results[0][0][:77], results[1][0][:77])


def test_separate_rope_channels_are_those_of_all_heads():
    q, k, v, rope = torch.randn(3, 4, 7), torch.randn(5, 2, 4), torch.randn(5, 2, 6), torch.randn(5, 3)
    bounds = i32([0, 3]), i32([0, 5]), 5, 0.7
    whole = torch.cat((k, rope[:, None].expand(-1, 2, -1)), -1)
    assert_same_bits(mha_varlen_fwd(q, k, v, *bounds, k_rope=rope), mha_varlen_fwd(q, whole, v, *bounds))


WRONG = (-1, -(2**31), 7, 2**31 - 1)


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "kept"),
    [
        *(([wrong, 2, 4], [0, 3, 6], 2) for wrong in WRONG),
        *(([0, 2, 4], [wrong, 3, 6], 2) for wrong in WRONG),
        ([3, 1, 0], [6, 2, 0], 4),
    ],
)
def test_a_sequence_with_a_wrong_bound_attends_to_nothing(cu_q, cu_k, kept):
    """The first sequence has a wrong boundary, and in the last case both have one. Queries from `kept` on have right
    boundaries."""
    q, k = torch.randn(4, 1, 3), torch.randn(6, 1, 3)
    right, right_lse = mha_varlen_fwd(q, k, k, i32([0, 2, 4]), i32([0, 3, 6]), 6, 1.0)
    out, lse = mha_varlen_fwd(q, k, k, i32(cu_q), i32(cu_k), 6, 1.0)
    assert not out[:kept].any() and lse[:, :kept].eq(INF).all()
    assert_same_bits((out[kept:], lse[:, kept:]), (right[kept:], right_lse[:, kept:]))
