"""The references of multi-head attention over packed sequences and of selections' bits: chunks, bounds, refusals."""

import math

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.mla import keys_of_bits
from dsa.reference.mla import mha_varlen_fwd as module
from dsa.reference.mla.mha_varlen_fwd import mha_varlen_fwd
from dsa.reference.mla.selection_bits import selected_keys, selection_bits
from tests.reference.common import assert_refused, i32

(CASE,), (BITS,) = cases_of("mha_varlen_fwd"), cases_of("selection_bits")


def test_selected_keys_are_those_of_the_bits():
    bits = BITS.run(BITS.arguments(tokens=5, max_keys=300))[0]
    assert torch.equal(selected_keys(bits, 310), keys_of_bits(bits)[:, :310])
    assert (
        torch.equal(selected_keys(bits, 500)[:, :384], keys_of_bits(bits))
        and not selected_keys(bits, 500)[:, 384:].any()
    )


def test_bits_of_starts_near_the_end_of_int32_are_right():
    given = BITS.arguments(tokens=5, top_k=3) | {"starts": i32([2**31 - 5] * 5)}
    given["indices"][:] = i32([2**31 - 1, 2**31 - 5, 2**31 - 4])
    BITS.check(given, BITS.run(given))


def test_bits_of_indices_that_count_from_the_first_key():
    indices = torch.randint(-5, 420, (5, 40), dtype=torch.int32)
    assert torch.equal(selection_bits(indices, None, 300), selection_bits(indices, i32([0] * 5), 300))


@pytest.mark.parametrize(("indices", "max_keys"), [((0, 3), 9), ((3, 0), 9), ((3, 2), 0)])
def test_bits_of_nothing(indices, max_keys):
    bits = selection_bits(torch.zeros(indices, dtype=torch.int32), i32([50] * indices[0]), max_keys)
    assert bits.shape == (indices[0], 4 * (max_keys > 0)) and not bits.any()


@pytest.mark.parametrize("chunk", [2**26, 100])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("top_k", [0, 60])
def test_sequences_are_right_however_many_queries_are_computed_at_a_time(top_k, causal, chunk, monkeypatch):
    """Prefixes, sequences without queries or keys, and with fewer keys than queries; queries of none."""
    monkeypatch.setattr(module, "_CHUNK", chunk)
    given = CASE.arguments(
        sequences=((4, 7), (0, 1), (5, 140), (3, 2), (2, 0)),
        dims=(6, 5),
        dtype=torch.float32,
        causal=causal,
        top_k=top_k,
        more=2,
    )
    found = CASE.run(given)
    CASE.check(given, found)
    assert not found[0][14:].any() and found[1][:, 14:].eq(math.inf).all()


def test_rope_channels_apart_are_those_of_all_heads():
    q, k, v, rope = torch.randn(3, 4, 7), torch.randn(5, 2, 4), torch.randn(5, 2, 6), torch.randn(5, 3)
    bounds = i32([0, 3]), i32([0, 5]), 5, 0.7
    whole = torch.cat((k, rope[:, None].expand(-1, 2, -1)), -1)
    got, expected = mha_varlen_fwd(q, k, v, *bounds, k_rope=rope), mha_varlen_fwd(q, whole, v, *bounds)
    assert all(torch.equal(x, y) for x, y in zip(got, expected))


def test_bounds_outside_are_those_of_nothing():
    q, k = torch.randn(4, 1, 3), torch.randn(6, 1, 3)
    right, right_lse = mha_varlen_fwd(q, k, k, i32([0, 2, 4]), i32([0, 3, 6]), 6, 1.0)
    for wrong in (-1, -(2**31), 7, 2**31 - 1):
        for cu_q, cu_k in (([wrong, 2, 4], [0, 3, 6]), ([0, 2, 4], [wrong, 3, 6])):
            out, lse = mha_varlen_fwd(q, k, k, i32(cu_q), i32(cu_k), 6, 1.0)
            assert not out[:2].any() and lse[:, :2].eq(math.inf).all()
            assert torch.equal(out[2:], right[2:]) and torch.equal(lse[:, 2:], right_lse[:, 2:])
    out, lse = mha_varlen_fwd(q, k, k, i32([3, 1, 0]), i32([6, 2, 0]), 6, 1.0)
    assert not out.any() and lse.eq(math.inf).all()


def test_gradients_reach_queries_keys_and_values():
    q, k, v = (torch.randn(3, 2, 4, requires_grad=True) for _ in range(3))
    out, _ = mha_varlen_fwd(q, k, v, i32([0, 3]), i32([0, 3]), 3, 0.5)
    out.square().sum().backward()
    assert all(x.grad.abs().sum() > 0 for x in (q, k, v))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": torch.zeros(4, 3, 8)}, "q: heads must be a multiple of k's 2, at least as many, got 3"),
        ({"q": torch.zeros(4, 0, 8)}, "q: heads must be a multiple of k's 2, at least as many, got 0"),
        ({"softmax_scale": 0.0}, "softmax_scale: must be above 0, got 0.0"),
        ({"softmax_scale": math.inf}, "softmax_scale"),
        ({"selected": torch.zeros(4, 8).int()}, r"selected: must have a multiple of 4 words a query, at least 12 of "),
        ({"selected": torch.zeros(4, 13).int()}, r"max_seqlen_k=300 keys, got 13"),
        ({"selected": torch.zeros(3, 12).int()}, r"selected: shape must be \[4, words\], got \[3, 12\]"),
        ({"cu_seqlens_k": torch.zeros(3).int()}, "cu_seqlens_k: shape must be"),
        ({"dense_keys": -1}, "dense_keys: must be at least 0, got -1"),
        ({"v": torch.zeros(5, 2, 8)}, "v: shape must be"),
        ({"k": torch.zeros(6, 2, 7)}, "k: must have q's 8 channels, got 7 and no k_rope"),
        (
            {"k": torch.zeros(6, 2, 7), "k_rope": torch.zeros(6, 0)},
            "k: must have q's 8 channels, got 7 and 0 in k_rope",
        ),
        ({"k_rope": torch.zeros(6, 3)}, "k: must have q's 8 channels, got 8 and 3 in k_rope"),
        ({"k_rope": torch.zeros(5, 3)}, "k_rope: shape must be"),
    ],
)
def test_wrong_arguments(changed, message):
    given = {"q": torch.zeros(4, 4, 8), "k": torch.zeros(6, 2, 8), "v": torch.zeros(6, 2, 8)}
    given |= {"cu_seqlens_q": i32([0, 4]), "cu_seqlens_k": i32([0, 6]), "max_seqlen_k": 300, "softmax_scale": 1.0}
    assert_refused(message, dsa.mha_varlen_fwd, **given | changed)
